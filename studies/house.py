"""How the source is laid out, in numbers that have limits: `make house` prints them and fails where one is exceeded.

A room is a package directly under one of `HOUSES`, or a module there; `__init__` and `__main__` are doors, not rooms.
A floor is a room's longest way down along imports. Imports inside functions count, those for type checkers alone do
not. A memory is what one call writes and a later one reads: a cached function, a name that functions rebind, a
container of a module that its functions fill. Limits only ever go down.
"""

import ast
import graphlib
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = ("adaattn_hf", "adaattn_cli", "patches", "configs", "eval")
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


HOUSES = {"": PACKAGE, **{f"{room}/": f"{PACKAGE}/{room}" for room in ("backends", "calibration")}}
HOUSES |= {"cli/": "adaattn_cli", "patches/": "patches"}
"""Directories whose rooms are counted, by what stands before the names of their limits."""
PARAMETERS = 8
"""Functions with more are counted."""
FILLED = ("add", "append", "appendleft", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update")


def room_of(parts: tuple[str, ...]) -> str | None:
    """The room of a module, given by its path below the directory; None for a door."""
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


def arrows(root: Path, house: str = PACKAGE) -> dict[str, set[str]]:
    """Room to the rooms that it imports, within a directory."""
    base = tuple(house.split("/"))
    # mapped directories are imported under the package's name
    names = (base, (PACKAGE, *base)) if base[0] != PACKAGE else (base,)
    files = [path.relative_to(root / house) for path in sorted((root / house).rglob("*.py"))]
    rooms = {room for path in files if (room := room_of(path.with_suffix("").parts)) is not None}
    found: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for path in files:
        room = room_of(path.with_suffix("").parts)
        if room is None:
            continue
        tree = ast.parse((root / house / path).read_text(encoding="utf-8"))
        for name in imports_of(tree, (*base, *path.parent.parts)):
            for own in names:
                if name[: len(own)] == own and len(name) > len(own):
                    other = name[len(own)]
                    if other in rooms and other != room:
                        found[room].add(other)
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
    for name, tree in trees(root).items():
        for node in ast.walk(tree) if "plans/choices" not in name else ():
            if isinstance(node, ast.Compare):
                compared = ast.unparse(node.left)
                if "choice" in compared and compared.endswith(".kind"):
                    places.append(f"{name}:{node.lineno}")
    return places


def line_counts(root: Path) -> dict[str, int]:
    """Lines of every Python file that the wheel holds."""
    files = (path for directory in INSTALLED for path in sorted((root / directory).rglob("*.py")))
    return {
        path.relative_to(root).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
        if "/metric/" not in path.as_posix()
    }


def lines_under(root: Path, directory: str) -> int:
    """Lines of the Python files under a directory."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / directory).rglob("*.py"))


def trees(root: Path) -> dict[str, ast.Module]:
    """The syntax tree of every Python file that the wheel holds."""
    return {name: ast.parse((root / name).read_text(encoding="utf-8")) for name in line_counts(root)}


def crowded(tree: ast.Module) -> list[str]:
    """Functions of more than eight parameters, `self` not counted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            told = node.args
            names = [one.arg for one in (*told.posonlyargs, *told.args, *told.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls", "ctx")]) > PARAMETERS:
                found.append(f"{node.name}:{node.lineno}")
    return found


def late_imports(tree: ast.Module) -> list[str]:
    """Imports inside functions, by line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {node for function in functions for node in ast.walk(function)}
    return [f"{node.lineno}" for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))]


def memories(tree: ast.Module) -> list[str]:
    """What one call of a module writes and a later one reads, by name and line."""
    containers = {
        target.id: node.lineno
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found: dict[str, int] = {}
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any("cache" in ast.unparse(one).split("(")[0].split(".")[-1] and "property" not in ast.unparse(one)
               for one in function.decorator_list):  # fmt: skip
            found[function.name] = function.lineno
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found |= dict.fromkeys(node.names, function.lineno)
            written: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLED:
                written = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                written = node.value
            if isinstance(written, ast.Name) and written.id in containers:
                found[written.id] = containers[written.id]
    return [f"{name}:{line}" for name, line in sorted(found.items())]


def limits(root: Path = ROOT) -> list[Limit]:
    """All numbers with their limits."""
    lines, parsed = line_counts(root), trees(root)
    rows = []
    most = dict(zip(HOUSES, [(10, 5, 20), (9, 4, 16), (11, 6, 21), (15, 3, 30), (10, 7, 19)], strict=True))
    for name, house in HOUSES.items():
        round_trip = circle(graph := arrows(root, house))
        rooms, storeys, between = most[name]
        rows += [
            Limit(f"{name}rooms", len(graph), rooms),
            Limit(f"{name}floors", len(graph) if round_trip else max(floors(graph).values(), default=0), storeys),
            Limit(f"{name}arrows between rooms", sum(len(targets) for targets in graph.values()), between),
            Limit(f"{name}rooms in a circle", len(round_trip), 0),
        ]
    return [
        *rows,
        Limit("branches on a choice's kind outside plans/choices/", len(branches_on_a_kind(root)), 0),
        Limit("median lines of a module", statistics.median(lines.values()), 120),
        Limit("lines of the longest module", max(lines.values()), 400),
        Limit("lines of Python in the wheel", sum(lines.values()), 28_230),
        Limit("lines of studies", lines_under(root, "studies"), 4_920),
        Limit("lines of tests", lines_under(root, "tests"), 38_990),
        Limit("functions of more than 8 parameters", sum(len(crowded(tree)) for tree in parsed.values()), 26),
        Limit("imports inside functions", sum(len(late_imports(tree)) for tree in parsed.values()), 38),
        Limit("memories", sum(len(memories(tree)) for tree in parsed.values()), 18),
    ]


def main() -> None:
    """Print the numbers; exit 1 if one exceeds its limit. `--list` names functions, imports and memories that count."""
    for name, house in HOUSES.items():
        print(f"{name or PACKAGE + '/'}")
        for room, targets in arrows(ROOT, house).items():
            print(f"  {room}: {', '.join(sorted(targets)) or '-'}")
    rows = limits()
    for row in rows:
        print(f"{row.name}: {row.value:g} of at most {row.most:g}{'' if row.kept else '  EXCEEDED'}")
    for place in branches_on_a_kind(ROOT):
        print(f"branches on a kind: {place}")
    if "--list" in sys.argv:
        for path, tree in trees(ROOT).items():
            kinds = ("parameters", crowded(tree)), ("import", late_imports(tree)), ("memory", memories(tree))
            for what, place in ((what, place) for what, found in kinds for place in found):
                print(f"{what}: {path}:{place}")
    if not all(row.kept for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
