"""What knows a model lives in `patches/`: the core reads no attribute by which Transformers names things."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.source_tree import MAPPED, ROOT

OF_MODELS = frozenset({"layer_idx", "base_model_prefix", "_hf_hook", "wpe"})
"""Names of attributes and modules that Transformers and accelerate give."""
OF_THE_STACK = frozenset({"_getframe", "currentframe", "f_back", "f_locals"})
"""How callers are looked at from within."""
LOOKS_AT_CALLERS = {
    # a mask function is not handed what its model was called with, and no other way of Transformers leads to it
    "patches/mask/masks.py",
    # a layer does not know the model that runs it
    "patches/plans/layers.py",
    # a warning names the user's line
    "adaattn_hf/errors.py",
    # Ctrl-C must not be raised in a finalizer
    "adaattn_cli/__init__.py",
}
"""Files that do."""


def named(path: Path, names: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = node.attr if isinstance(node, ast.Attribute) else None
        found = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else found
        if found in names:
            yield f"{path.name}:{node.lineno}: {found}"  # type: ignore[attr-defined]


def test_the_core_reads_nothing_that_models_name() -> None:
    found = [place for path in sorted((ROOT / "adaattn_hf").rglob("*.py")) for place in named(path, OF_MODELS)]
    assert found == []


def test_callers_are_looked_at_where_it_is_said_alone() -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for directory in MAPPED
        for path in (ROOT / directory).rglob("*.py")
        if any(named(path, OF_THE_STACK))
    }
    assert files == LOOKS_AT_CALLERS


@pytest.mark.parametrize("line", [
    "index = module.layer_idx", 'index = getattr(module, "layer_idx", None)',
    'kept = module.__dict__["_hf_hook"]', 'LEARNED = ("position_embeddings", "wpe")',
    "frame = sys._getframe(1)", "outer = frame.f_back",
])  # fmt: skip
def test_a_planted_violation_is_found(line: str, tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(f"def f(module, frame):\n    {line}\n")
    assert len(list(named(planted, OF_MODELS | OF_THE_STACK))) == 1
