"""What the source may not contain: placeholders, swallowed errors, drawers, files that nobody can take in."""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

import adaattn_hf
from adaattn_cli.commands import COMMANDS

from ..support.source_tree import ROOT, parsed, read_modules

DRAWERS = {"utils", "util", "common", "helpers", "misc", "manager"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|WIP)\b|not (yet )?implemented|placeholder|stub", re.IGNORECASE)
ALLOWED_MENTIONS = re.compile(r"NotImplemented\b")


def is_protocol_or_abstract(function: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents.get(function)
    decorators = [ast.unparse(d) for d in getattr(function, "decorator_list", [])]
    if any("abstractmethod" in d or "overload" in d for d in decorators):
        return True
    return isinstance(parent, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in parent.bases)


def parents_of(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented and isinstance(first.value.value, str) else body  # type: ignore[union-attr]


def placeholders(source: str) -> Iterator[str]:
    """Functions without content, `raise NotImplementedError`, promises in comments."""
    tree = parsed(source)
    parents = parents_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = without_docstring(node.body)
            # a function that has nothing to do says so in its docstring, and that is its content
            lone = len(body) == 1 and (
                isinstance(body[0], ast.Pass) or (isinstance(body[0], ast.Expr) and ast.unparse(body[0]) == "...")
            )
            if lone and not is_protocol_or_abstract(node, parents):
                yield f"{node.lineno}: {node.name} has no content"
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc):
            yield f"{node.lineno}: raises NotImplementedError"
    for number, line in enumerate(source.splitlines(), 1):
        comment = line.partition("#")[2]
        if UNFINISHED.search(comment) and not ALLOWED_MENTIONS.search(comment):
            yield f"{number}: {comment.strip()}"


def swallowed(source: str) -> Iterator[str]:
    """Handlers that catch everything, and handlers that do nothing."""
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "" if node.type is None else ast.unparse(node.type)
        if node.type is None or re.search(r"\b(Base)?Exception\b", caught):
            ends_with_raise = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if not ends_with_raise:
                yield f"{node.lineno}: catches {caught or 'everything'}"
        elif len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
            yield f"{node.lineno}: drops {caught} in silence"


def undocumented(source: str) -> Iterator[str]:
    """Modules, public classes and public functions without a docstring that says something."""
    tree = parsed(source)
    parents = parents_of(tree)
    if source.strip() and len((ast.get_docstring(tree) or "").strip(". ")) < 10:
        yield "1: the module says nothing of itself"
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_") or not isinstance(parents[node], (ast.Module, ast.ClassDef)):
            continue
        if isinstance(parents[node], ast.ClassDef) and parents[node].name.startswith("_"):  # type: ignore[attr-defined]
            continue
        if not (ast.get_docstring(node) or "").strip(". "):
            yield f"{node.lineno}: {node.name} has no docstring"


def lines_with(pattern: str) -> Callable[[str], Iterator[str]]:
    """The check that finds lines with a pattern."""
    return lambda source: (
        f"{number}: {line.strip()}" for number, line in enumerate(source.splitlines(), 1) if re.search(pattern, line)
    )


speaks_of_the_workplace = lines_with(r"(?<![\w.])/(work|tmp|root|home)/|\bissue \d|\.\./shared/(?!assets)")
"""Paths and names that mean something on one machine alone."""
manages_the_allocator = lines_with(r"\b(empty_cache|set_per_process_memory_fraction)\(")
"""Calls that empty or limit torch's memory pool, which belongs to the user's program."""


def dead_advice(source: str) -> Iterator[str]:
    """Functions and commands that a message or a docstring recommends and that do not exist."""
    for number, line in enumerate(source.splitlines(), 1):
        for name in re.findall(r"\badaattn_hf\.(\w+)\(", line):
            if not hasattr(adaattn_hf, name):
                yield f"{number}: adaattn_hf.{name}(…) is not public"
        for name in re.findall(r"`adaattn (\w+)", line):
            if name not in {words.split()[0] for words in COMMANDS}:
                yield f"{number}: there is no command `adaattn {name}`"


def own_suggestions(source: str) -> Iterator[str]:
    """Nearest names and warnings anywhere but in `errors`, which knows one sentence and the user's line."""
    if "def unknown(" not in source:
        yield from lines_with(r"get_close_matches|warnings\.warn\(")(source)


FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"tensor", "zeros"}


def leaves_the_device_open(source: str) -> Iterator[str]:
    """New tensors without a device: `torch.set_default_device` would put them where kernels do not look for them."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and re.fullmatch(r"torch\.\w+", called := ast.unparse(node.func)):
            names = {keyword.arg for keyword in node.keywords}
            if called.removeprefix("torch.") in FACTORIES and not names & {"device", None}:
                yield f"{node.lineno}: {called} names no device"


FLOATING = FACTORIES - {"arange", "randint", "randperm"}
"""Those whose dtype is the default one, or that of what they are given: an empty list of integers gives floats."""


def leaves_the_dtype_open(source: str) -> Iterator[str]:
    """New tensors without a dtype: `torch.set_default_dtype` would decide it."""
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Call) or not re.fullmatch(r"torch\.\w+", called := ast.unparse(node.func)):
            continue
        name, names = called.removeprefix("torch."), {keyword.arg for keyword in node.keywords}
        numbers = [value for value in node.args if isinstance(value, (ast.Constant, ast.UnaryOp))]
        floats = any(isinstance(value, ast.Constant) and isinstance(value.value, float) for value in numbers)
        of_numbers = (name == "where" and len(numbers) == 2) or (name == "arange" and floats)
        if (name in FLOATING or of_numbers) and not names & {"dtype", None}:
            yield f"{node.lineno}: {called} names no dtype"


CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "placeholders": placeholders, "swallowed": swallowed, "undocumented": undocumented,
    "workplace": speaks_of_the_workplace, "advice": dead_advice, "suggestions": own_suggestions,
    "allocator": manages_the_allocator, "device": leaves_the_device_open, "dtype": leaves_the_dtype_open,
}  # fmt: skip
PLANTED = {
    "placeholders": [
        '"""A module of ten words."""\ndef f():\n    pass\n',
        "def f():\n    raise NotImplementedError\n",
        "x = 1  # TODO: later\n",
    ],
    "swallowed": [
        "try:\n    f()\nexcept Exception:\n    x = 1\n",
        "try:\n    f()\nexcept:\n    x = 1\n",
        "try:\n    f()\nexcept KeyError:\n    pass\n",
    ],
    "undocumented": ["def f():\n    return 1\n", '"""."""\n', '"""What this module is for."""\nclass A:\n    x = 1\n'],
    "workplace": ["x = '/work/main'\n", "# see issue 5\n"],
    "suggestions": ["near = difflib.get_close_matches(name, known)\n", "warnings.warn(words, stacklevel=2)\n"],
    "allocator": ["torch.cuda.empty_cache()\n", "torch.cuda.set_per_process_memory_fraction(0.7)\n"],
    "device": ["table = torch.tensor(rows, dtype=torch.int64)\n"],
    "dtype": [
        "table = torch.zeros(3, device=d)\n", "rows = torch.tensor(rows, device=d)\n",
        "sign = torch.where(x > 0, 1.0, -1.0)\n", "steps = torch.arange(0, 1, 0.1, device=d)\n",
    ],
    "advice": ["raise ValueError('call adaattn_hf.repair(model)')\n", "# written by `adaattn mend`\n"],
}  # fmt: skip


@pytest.mark.parametrize("check", list(CHECKS))
def test_no_module_breaks_the_rule(check: str) -> None:
    found = [
        f"{module.path.relative_to(ROOT)}:{finding}"
        for module in read_modules().values()
        for finding in CHECKS[check](module.path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(("check", "text"), [(c, t) for c, texts in PLANTED.items() for t in texts])
def test_the_rule_finds_a_planted_violation(check: str, text: str) -> None:
    assert list(CHECKS[check](text))


def test_there_is_no_drawer() -> None:
    names = {module.rpartition(".")[2] for module in read_modules()}
    assert names & DRAWERS == set()
