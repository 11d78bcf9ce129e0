"""The package's own source, read without importing it: modules under their installed names, and their imports."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
MAPPED = MappingProxyType(
    {
        "adaattn_hf": "adaattn_hf", "adaattn_cli": "adaattn_cli", "patches": "adaattn_hf.patches",
        "configs": "adaattn_hf.configs", "eval": "adaattn_hf.eval",
    }
)  # fmt: skip
"""Directory of the checkout -> package that it is installed as."""


@dataclass(frozen=True)
class Import:
    """One import statement: the module (or name) that it asks for, and whether only type checkers see it."""

    target: str
    line: int
    typing_only: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    imports: tuple[Import, ...]

    @property
    def tree(self) -> ast.Module:
        return parsed(self.path.read_text(encoding="utf-8"))


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def read_modules(root: Path = ROOT, mapped: Mapping[str, str] = MAPPED) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for directory, package in mapped.items():
        for path in sorted((root / directory).rglob("*.py")):
            parts = (package, *path.relative_to(root / directory).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            base = parts[:-1]
            found[name] = Module(name, path, tuple(_imports(parsed(path.read_text(encoding="utf-8")), base)))
    return found


def _imports(tree: ast.AST, base: tuple[str, ...], typing_only: bool = False) -> Iterator[Import]:
    """All import statements under a node; relative ones resolved against the package `base`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only)
        elif isinstance(node, ast.ImportFrom):
            parents = base[: len(base) - node.level + 1] if node.level else ()
            module = ".".join((*parents, *([node.module] if node.module else [])))
            for alias in node.names:
                yield Import(f"{module}.{alias.name}", node.lineno, typing_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from _imports(ast.Module(body=[child], type_ignores=[]), base, typing_only=True)
            for child in node.orelse:
                yield from _imports(ast.Module(body=[child], type_ignores=[]), base, typing_only)
        else:
            yield from _imports(node, base, typing_only)


def arrows(modules: Mapping[str, Module]) -> list[tuple[str, str, Import]]:
    """(importer, imported, statement) for imports between modules of the tree, without those for type checkers."""
    found = []
    for module in modules.values():
        for statement in module.imports:
            target = owner(statement.target, modules)
            if target is not None and target != module.name and not statement.typing_only:
                found.append((module.name, target, statement))
    return found


def owner(target: str, modules: Mapping[str, Module]) -> str | None:
    """The module of the tree that an imported dotted name belongs to: itself, or the one that defines the name."""
    if target in modules:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in modules else None
