"""The numbers of the source's layout: kept here, and exceeded by planted violations."""

import ast
from pathlib import Path

import pytest

from studies.house import arrows, branches_on_a_kind, circle, crowded, floors, limits, memories

CLEAN = {
    "adaattn_hf/__init__.py": "from .plans import plan\n", "adaattn_hf/attention/structure.py": "import torch\n",
    "adaattn_hf/plans/plan.py": "from typing import TYPE_CHECKING\nfrom ..attention.structure import x\n"
    "if TYPE_CHECKING:\n    from ..calibration import search\n",
    "adaattn_hf/calibration/search.py": "def f():\n    from adaattn_hf.plans.plan import x\n", "patches/masks.py": "",
    "configs/__init__.py": "", "eval/report.py": "",
}  # fmt: skip


def planted(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def exceeded(root: Path) -> list[str]:
    return [limit.name for limit in limits(root) if not limit.kept]


def test_the_source_keeps_every_limit() -> None:
    assert [limit for limit in limits() if not limit.kept] == []


def test_rooms_floors_and_arrows_are_counted(tmp_path: Path) -> None:
    graph = arrows(planted(tmp_path, CLEAN))
    assert graph == {"attention": set(), "plans": {"attention"}, "calibration": {"plans"}}
    assert floors(graph) == {"attention": 1, "plans": 2, "calibration": 3}
    assert circle(graph) == []
    assert exceeded(tmp_path) == []


@pytest.mark.parametrize(("file", "text", "names"), [
    ("adaattn_hf/attention/structure.py", "from ..calibration.search import f\n", ["rooms in a circle"]),
    (
        "patches/masks.py", 'def f(choice):\n    return choice.kind == "window"\n',
        ["branches on a choice's kind outside plans/choices/"],
    ),
    ("eval/report.py", "x = 1\n" * 401, ["lines of the longest module"]),
])  # fmt: skip
def test_a_planted_violation_is_found(file: str, text: str, names: list[str], tmp_path: Path) -> None:
    planted(tmp_path, {**CLEAN, file: text})
    assert exceeded(tmp_path) == names


@pytest.mark.parametrize("house", ["adaattn_hf", "adaattn_hf/backends", "patches"])
def test_too_many_rooms_are_found(house: str, tmp_path: Path) -> None:
    planted(tmp_path, {**CLEAN, **{f"{house}/room{number}.py": "" for number in range(40)}})
    name = {"adaattn_hf": "rooms", "adaattn_hf/backends": "backends/rooms", "patches": "patches/rooms"}[house]
    assert exceeded(tmp_path) == [name]


def test_rooms_of_mapped_directories_are_counted_under_both_names(tmp_path: Path) -> None:
    own = {
        "patches/call/interface.py": "from ..masks import x\nfrom adaattn_hf.patches.registry import y\n",
        "patches/registry.py": "",
    }
    assert arrows(planted(tmp_path, {**CLEAN, **own}), "patches") == {
        "call": {"masks", "registry"}, "masks": set(), "registry": set()
    }  # fmt: skip


def test_arrows_within_backends_and_a_circle_of_patches_are_found(tmp_path: Path) -> None:
    many = {
        f"adaattn_hf/backends/room{n}.py": "".join(f"from .room{m} import x\n" for m in range(n)) for n in range(12)
    }
    assert "backends/arrows between rooms" in exceeded(planted(tmp_path, {**CLEAN, **many}))
    turned = {"patches/a.py": "from .b import x\n", "patches/b.py": "from .a import x\n"}
    assert "patches/rooms in a circle" in exceeded(planted(tmp_path, {**CLEAN, **turned}))


@pytest.mark.parametrize(
    ("directory", "name"),
    [("eval", "lines of Python in the wheel"), ("studies", "lines of studies"), ("tests", "lines of tests")],
)
def test_too_many_lines_are_found(directory: str, name: str, tmp_path: Path) -> None:
    planted(tmp_path, {**CLEAN, **{f"{directory}/m{n}.py": "x = 1\n" * 399 for n in range(110)}})
    assert name in exceeded(tmp_path)


def test_functions_of_many_parameters_are_counted() -> None:
    tree = ast.parse("def few(self, a, b, c, d, e, f, g, h): ...\ndef many(a, b, c, d, e, f, g, *, h, i): ...\n")
    assert crowded(tree) == ["many:2"]


@pytest.mark.parametrize("text", [
    "seen = {}\ndef f(x):\n    seen[x] = 1\n", "seen = set()\ndef f(x):\n    seen.add(x)\n",
    "last = None\ndef f(x):\n    global last\n    last = x\n",
    "import functools\n@functools.lru_cache(maxsize=8)\ndef seen(x):\n    return x\n",
    "import functools\n@functools.cache\ndef seen(x):\n    return x\n",
])  # fmt: skip
def test_a_memory_is_found(text: str) -> None:
    assert len(memories(ast.parse(text))) == 1


def test_what_lives_with_an_object_or_a_call_is_no_memory() -> None:
    assert memories(ast.parse("def f(x):\n    seen = {}\n    seen[x] = 1\n")) == []
    assert memories(ast.parse("class A:\n    @functools.cached_property\n    def b(self): ...\n")) == []
    assert memories(ast.parse("KNOWN = {1: 2}\ndef f(x):\n    return KNOWN[x]\n")) == []


def test_too_many_memories_parameters_and_late_imports_are_found(tmp_path: Path) -> None:
    text = "seen = {}\ndef f(a, b, c, d, e, g, h, i, j):\n    import k\n    seen[a] = k\n"
    planted(tmp_path, {**CLEAN, **{f"eval/m{n}.py": text for n in range(80)}})
    names = {"memories", "functions of more than 8 parameters", "imports inside functions"}
    assert names <= set(exceeded(tmp_path))


def test_a_choice_may_ask_itself(tmp_path: Path) -> None:
    own = {"adaattn_hf/plans/choices/window.py": 'def f(choice):\n    return choice.kind == "window"\n'}
    assert branches_on_a_kind(planted(tmp_path, {**CLEAN, **own})) == []
