"""What the kernel repositories of `hub/` take from the package stands alone: torch, Triton and the standard library."""

import ast
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ..support.source_tree import ROOT

BUILDER = runpy.run_path(str(ROOT / "hub" / "build.py"))


@pytest.mark.parametrize("name", BUILDER["NAMES"])
def test_no_import_leads_out_of_a_kernel(name: str) -> None:
    """The build refuses whatever else a module imports, here before it comes to a build."""
    modules = BUILDER["package_modules"](name)
    assert {"attention/structure.py", "backends/native/launch.py", "backends/triton/launch.py"} <= set(modules)


def bound(tree: ast.Module) -> set[str]:
    """The names that a module binds outside of its functions and classes."""
    names: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            waiting += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
        else:
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return names


def absent(modules: Mapping[str, Path], own: Mapping[str, Path]) -> Iterator[str]:
    """Names that a kernel's `own` modules import relatively, or ask of modules so imported, and that are not there."""
    trees = {inside: ast.parse(path.read_text(encoding="utf-8")) for inside, path in modules.items()}

    def module_at(parts: list[str]) -> str | None:
        stem = "/".join(parts)
        return next((one for one in (f"{stem}.py", f"{stem}/__init__.py") if one in trees), None)

    for inside in own:
        known: dict[str, str] = {}
        for node in ast.walk(trees[inside]):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = inside.split("/")[: -node.level] + (node.module.split(".") if node.module else [])
            source = module_at(base) if base else "__init__.py"
            for alias in node.names:
                target = module_at([*base, alias.name])
                if target is not None:
                    known[alias.asname or alias.name] = target
                elif source is None or alias.name not in bound(trees[source]):
                    yield f"{inside}: {'.'.join([*base, alias.name])}"
        for node in ast.walk(trees[inside]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                target = known[node.value.id]
                if node.attr not in bound(trees[target]):
                    yield f"{inside}: {target.removesuffix('.py').replace('/', '.')}.{node.attr}"


@pytest.mark.parametrize("name", BUILDER["NAMES"])
def test_every_name_that_a_kernel_imports_is_in_the_package(name: str) -> None:
    assert list(absent(BUILDER["package_modules"](name), BUILDER["own_modules"](name))) == []


@pytest.mark.parametrize(("line", "named"), [
    ("from .backends.select import attend_all", "backends.select.attend_all"),
    ("from .backends import select\n\nselect.attend_all()", "backends.select.attend_all"),
    ("def later():\n    from .plans import executed", "plans.executed"),
])  # fmt: skip
def test_a_name_that_is_gone_is_found(line: str, named: str, tmp_path: Path) -> None:
    planted = {"planted.py": tmp_path / "planted.py"}
    planted["planted.py"].write_text(line + "\n")
    modules = {**BUILDER["package_modules"]("adaattn"), **planted}
    assert list(absent(modules, planted)) == [f"planted.py: {named}"]
