"""The numbers of the source's layout: kept here, and exceeded by planted violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.house import arrows, branches_on_a_kind, circle, floors, limits

CLEAN = {
    "adaattn_hf/__init__.py": "from .plans import plan\n",
    "adaattn_hf/attention/structure.py": "import torch\n",
    "adaattn_hf/plans/plan.py": "from typing import TYPE_CHECKING\nfrom ..attention.structure import x\n"
    "if TYPE_CHECKING:\n    from ..cli import main\n",
    "adaattn_hf/cli/main.py": "def f():\n    from adaattn_hf.plans.plan import x\n",
    "patches/masks.py": "",
    "configs/__init__.py": "",
    "eval/report.py": "",
}


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
    assert graph == {"attention": set(), "plans": {"attention"}, "cli": {"plans"}}
    assert floors(graph) == {"attention": 1, "plans": 2, "cli": 3}
    assert circle(graph) == []
    assert exceeded(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        ("adaattn_hf/attention/structure.py", "from ..cli.main import f\n", ["rooms in a circle"]),
        (
            "patches/masks.py",
            'def f(choice):\n    return choice.kind == "window"\n',
            ["branches on a choice's kind outside plans/choices/"],
        ),
        ("eval/report.py", "x = 1\n" * 401, ["lines of the longest module"]),
    ],
)
def test_a_planted_violation_is_found(file: str, text: str, names: list[str], tmp_path: Path) -> None:
    planted(tmp_path, {**CLEAN, file: text})
    assert exceeded(tmp_path) == names


def test_too_many_rooms_are_found(tmp_path: Path) -> None:
    planted(tmp_path, {**CLEAN, **{f"adaattn_hf/room{number}.py": "" for number in range(12)}})
    assert exceeded(tmp_path) == ["rooms"]


def test_a_choice_may_ask_itself(tmp_path: Path) -> None:
    own = {"adaattn_hf/plans/choices/window.py": 'def f(choice):\n    return choice.kind == "window"\n'}
    assert branches_on_a_kind(planted(tmp_path, {**CLEAN, **own})) == []
