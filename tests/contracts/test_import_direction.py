"""Imports go down the layers that docs/architecture.md lists."""

import graphlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ..support.source_tree import MAPPED, Module, arrows, read_modules

P = "adaattn_hf"
FLOORS: tuple[tuple[str, ...], ...] = (
    (f"{P}.attention", f"{P}.config", f"{P}.errors", f"{P}._files"),  # what is asked; settings, errors and files
    (f"{P}.backends", f"{P}.stats", f"{P}.presets", f"{P}.configs"),  # how it is computed; measuring; named settings
    (f"{P}.plans",),  # what a layer does about a call
    (f"{P}.policy",),  # deciding
    (f"{P}.patches",),  # Transformers
    (P,),  # the face
    (f"{P}.eval",),  # a model over text: evidence
    (f"{P}.calibration",),  # making and verifying plans
    ("adaattn_cli", f"{P}.__main__"),  # the command line
)
"""From the ground up. An entry is a room: a package with all that it holds, or a module at the root."""

KNOW_TRANSFORMERS = (f"{P}.patches", f"{P}.eval", "adaattn_cli")
BACKEND_ROOMS_OPEN_TO_ALL = tuple(f"{P}.backends.{name}" for name in ("base", "capability"))
KNOW_ALL_BACKENDS = tuple(f"{P}.backends.{name}" for name in ("order", "select"))
FORBIDDEN_ROOMS = {
    f"{P}.attention.reference": (f"{P}.backends", f"{P}.policy", f"{P}.stats", f"{P}.plans"),
    f"{P}.backends": (f"{P}.attention.reference", f"{P}.policy", f"{P}.stats", f"{P}.plans", f"{P}.config"),
    f"{P}.stats": (f"{P}.policy", f"{P}.plans", f"{P}.backends"),
    f"{P}.policy": (f"{P}.backends", f"{P}.attention.reference"),
}
"""Whoever measures does not decide, whoever decides touches no forward, the oracle knows nobody."""


def within(name: str, room: str) -> bool:
    return name == room or (room != P and name.startswith(f"{room}."))


def floor_of(name: str) -> int | None:
    found = [(len(room), number) for number, rooms in enumerate(FLOORS) for room in rooms if within(name, room)]
    return max(found)[1] if found else None


def rising(modules: Mapping[str, Module]) -> list[str]:
    found = []
    for importer, imported, statement in arrows(modules):
        low, high = floor_of(importer), floor_of(imported)
        if low is not None and high is not None and high > low:
            found.append(f"{importer}:{statement.line} imports {imported}, {high - low} floors above")
    return found


def circle(modules: Mapping[str, Module]) -> list[str]:
    """Modules that import one another in a circle, in functions too; empty if there is none."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for importer, imported, _ in arrows(modules):
        # a package's own __init__ may gather names from its modules
        if not importer.startswith(f"{imported}."):
            graph[importer].add(imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def backend_room(name: str) -> str | None:
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == [P, "backends"] and len(parts) > 2 else None


def between_backends(modules: Mapping[str, Module]) -> list[str]:
    """Imports from one backend of another; what chooses and what measures knows them all and is none."""
    found = []
    for importer, imported, statement in arrows(modules):
        mine, other = backend_room(importer), backend_room(imported)
        if mine is None or other is None or mine == other or mine in KNOW_ALL_BACKENDS:
            continue
        if other not in BACKEND_ROOMS_OPEN_TO_ALL:
            found.append(f"{importer}:{statement.line} imports {imported}")
    return found


def into_forbidden_rooms(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{importer}:{statement.line} imports {imported}"
        for importer, imported, statement in arrows(modules)
        for room, forbidden in FORBIDDEN_ROOMS.items()
        if within(importer, room) and any(within(imported, closed) for closed in forbidden)
    ]


def of_transformers(modules: Mapping[str, Module]) -> list[str]:
    return [
        f"{module.name}:{statement.line} imports {statement.target}"
        for module in modules.values()
        if not any(within(module.name, room) for room in KNOW_TRANSFORMERS)
        for statement in module.imports
        if statement.target.split(".")[0] == "transformers"
    ]


def by_directory(modules: Mapping[str, Module]) -> list[str]:
    """Imports of a mapped directory by its own name, which would make a second module, or of what is not installed."""
    top = {name for name, package in MAPPED.items() if name != package} | {"tests", "studies"}
    return [
        f"{module.name}:{statement.line} imports {statement.target}"
        for module in modules.values()
        for statement in module.imports
        if statement.target.split(".")[0] in top
    ]


Rule = Callable[[Mapping[str, Module]], list[str]]
RULES: tuple[Rule, ...] = (rising, circle, between_backends, into_forbidden_rooms, of_transformers, by_directory)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_import_breaks_a_rule(rule: Rule) -> None:
    assert rule(read_modules()) == []


def test_every_module_has_a_floor() -> None:
    modules = read_modules()
    assert len(modules) > 50
    assert [name for name in modules if floor_of(name) is None] == []


def test_every_room_exists() -> None:
    modules = read_modules()
    rooms = [room for rooms in FLOORS for room in rooms]
    assert [room for room in rooms if not any(within(name, room) for name in modules)] == []


PLANTED = {
    "rising": ("adaattn_hf/attention/structure.py", "def f():\n    from ..plans.plan import x\n"),
    "circle": ("adaattn_hf/plans/plan.py", "def f():\n    import adaattn_hf.plans.store\n"),
    "between_backends": ("adaattn_hf/backends/sdpa.py", "from .eager import x\n"),
    "into_forbidden_rooms": ("adaattn_hf/stats/entropy.py", "from ..plans.plan import x\n"),
    "of_transformers": ("adaattn_hf/plans/plan.py", "from transformers.models import gpt2\n"),
    "by_directory": ("eval/bench/grid.py", "from patches.registry import x\n"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_finds_a_planted_violation(rule: Rule, tmp_path: Path) -> None:
    clean = {
        "adaattn_hf/__init__.py": "from .patches import register\n", "adaattn_hf/attention/__init__.py": "",
        "adaattn_hf/attention/structure.py": "import torch\n", "adaattn_hf/plans/__init__.py": "",
        "adaattn_hf/plans/plan.py": "from ..attention.structure import x\n",
        "adaattn_hf/plans/store.py": "from .plan import x\n", "adaattn_hf/stats/__init__.py": "",
        "adaattn_hf/stats/entropy.py": "", "adaattn_hf/backends/__init__.py": "",
        "adaattn_hf/backends/eager.py": "from ..attention.structure import x\n",
        "adaattn_hf/backends/sdpa.py": "from ..attention.structure import x\n",
        "patches/__init__.py": "from .registry import register\n",
        "patches/registry.py": "import transformers\nfrom adaattn_hf.backends import eager\n",
        "eval/bench/grid.py": "import adaattn_hf\n",
    }  # fmt: skip
    for name, text in clean.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rule(read_modules(tmp_path)) == []
    name, text = PLANTED[rule.__name__]
    (tmp_path / name).write_text(text)
    assert rule(read_modules(tmp_path)) != []
