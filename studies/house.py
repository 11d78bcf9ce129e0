"""How the source is laid out, in numbers that have limits: `make house` prints them and fails where one is exceeded.

A room is a package directly under `adaattn_hf/`, or a module there; `__init__` and `__main__` are doors, not rooms.
A floor is a room's longest way down along imports. Imports inside functions count, those for type checkers alone do
not.
"""

from __future__ import annotations

import ast
import graphlib
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = ("adaattn_hf", "patches", "configs", "eval")
"""Directories that the wheel holds."""
PACKAGE = "adaattn_hf"
DOORS = ("__init__", "__main__")


@dataclass(frozen=True)
class Limit:
    """A number and the most that it may be."""

    name: str
    value: float
    most: float

    @property
    def kept(self) -> bool:
        """Whether the number is within its limit."""
        return self.value <= self.most


def room_of(parts: tuple[str, ...]) -> str | None:
    """The room of a module of `adaattn_hf/`, given by its path below that directory; None for a door."""
    return None if parts[0] in DOORS else parts[0]


def imports_of(tree: ast.AST, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Dotted names that a module imports, relative ones resolved against its package; not those for type checkers."""
    names: set[tuple[str, ...]] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names |= {(*module, alias.name) for alias in node.names}
        else:
            names |= imports_of(node, package)
    return names


def arrows(root: Path) -> dict[str, set[str]]:
    """Room to the rooms that it imports, within `adaattn_hf/`."""
    files = [path.relative_to(root / PACKAGE) for path in sorted((root / PACKAGE).rglob("*.py"))]
    rooms = {room for path in files if (room := room_of(path.with_suffix("").parts)) is not None}
    found: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for path in files:
        room = room_of(path.with_suffix("").parts)
        if room is None:
            continue
        tree = ast.parse((root / PACKAGE / path).read_text(encoding="utf-8"))
        for name in imports_of(tree, (PACKAGE, *path.parent.parts)):
            if name[0] == PACKAGE and len(name) > 1 and name[1] in rooms and name[1] != room:
                found[room].add(name[1])
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Rooms that import one another in a circle; empty if there is none."""
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Room to its floor, 1 at the ground. The graph has no circle."""
    floor: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(graph).static_order():
        floor[room] = 1 + max((floor[below] for below in graph[room]), default=0)
    return floor


def branches_on_a_kind(root: Path) -> list[str]:
    """Places outside `plans/choices/` that compare a choice's kind: one more idea would have to be added there."""
    places = []
    for directory in INSTALLED:
        for path in sorted((root / directory).rglob("*.py")):
            if "plans/choices" in path.as_posix():
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Compare):
                    continue
                compared = ast.unparse(node.left)
                if "choice" in compared and compared.endswith(".kind"):
                    places.append(f"{path.relative_to(root)}:{node.lineno}")
    return places


def line_counts(root: Path) -> dict[str, int]:
    """Lines of every Python file that the wheel holds."""
    files = (path for directory in INSTALLED for path in sorted((root / directory).rglob("*.py")))
    return {
        path.relative_to(root).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
        if "/metric/" not in path.as_posix()
    }


def limits(root: Path = ROOT) -> list[Limit]:
    """All numbers with their limits."""
    graph, lines = arrows(root), line_counts(root)
    round_trip = circle(graph)
    return [
        Limit("rooms", len(graph), 11),
        Limit("floors", len(graph) if round_trip else max(floors(graph).values()), 6),
        Limit("arrows between rooms", sum(len(targets) for targets in graph.values()), 25),
        Limit("rooms in a circle", len(round_trip), 0),
        Limit("branches on a choice's kind outside plans/choices/", len(branches_on_a_kind(root)), 0),
        Limit("median lines of a module", statistics.median(lines.values()), 120),
        Limit("lines of the longest module", max(lines.values()), 400),
    ]


def main() -> None:
    """Print the numbers; exit 1 if one exceeds its limit."""
    graph = arrows(ROOT)
    for room, targets in graph.items():
        print(f"{room}: {', '.join(sorted(targets)) or '-'}")
    rows = limits()
    for row in rows:
        print(f"{row.name}: {row.value:g} of at most {row.most:g}{'' if row.kept else '  EXCEEDED'}")
    for place in branches_on_a_kind(ROOT):
        print(f"branches on a kind: {place}")
    print(f"lines of Python in the wheel: {sum(line_counts(ROOT).values())}")
    if not all(row.kept for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
