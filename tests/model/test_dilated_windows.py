"""Dilated windows: no model hands one over, which is why no rule says them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import transformers

SOURCE = Path(transformers.__file__).parent
POSITIONS = {"q_idx", "kv_idx"}
"""What Transformers calls the places of query and key in a mask function."""


def places_of_dilation(source: str) -> Iterator[str]:
    """Attention classes and mask functions that dilate, of a file that hands attention or masks to implementations."""
    reaches = "ALL_ATTENTION_FUNCTIONS" in source or "masking_utils" in source or "def and_masks" in source
    if not reaches or not re.search(r"dilat|(q|kv)_idx\W.*%|%.*\W(q|kv)_idx", source, re.IGNORECASE):
        return  # most files: nothing to parse
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and POSITIONS & {a.arg for a in node.args.args}:
            remainders = (n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod))
            named = {n.id for r in remainders for n in ast.walk(r) if isinstance(n, ast.Name)}
            if POSITIONS & named:
                yield node.name
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and re.search("atten|mask", node.name, re.IGNORECASE):
            for inside in ast.walk(node):
                if isinstance(inside, ast.keyword) and ast.unparse(inside) == "dilation=1":
                    continue  # an unfold that does not dilate
                words = (getattr(inside, name, None) for name in ("id", "attr", "arg"))
                if any(isinstance(word, str) and "dilat" in word.lower() for word in words):
                    yield node.name
                    break


def test_no_model_of_transformers_hands_over_a_dilated_window() -> None:
    """Once one does, a rule of the structure pays: docs/troubleshooting.md says why there is none."""
    files = [SOURCE / "masking_utils.py", *(SOURCE / "models").rglob("modeling_*.py")]
    assert len(files) > 300
    found = {str(file.relative_to(SOURCE)): list(places_of_dilation(file.read_text("utf-8"))) for file in files}
    assert not {name: places for name, places in found.items() if places}


def test_the_search_sees_dilation_where_there_is_one() -> None:
    """DiNAT dilates, in attention of its own; a mask function might by a remainder."""
    own = (SOURCE / "models" / "dinat" / "modeling_dinat.py").read_text("utf-8")
    assert not list(places_of_dilation(own))
    assert "NeighborhoodAttention" in list(places_of_dilation(own + "\nALL_ATTENTION_FUNCTIONS"))
    planted = """
from ...masking_utils import and_masks
def overlay(step):
    def inner(batch_idx, head_idx, q_idx, kv_idx):
        return (q_idx - kv_idx) % step == 0
    return inner
"""
    assert list(places_of_dilation(planted)) == ["inner"]
    assert not list(places_of_dilation(planted.replace("% step == 0", "< step")))
