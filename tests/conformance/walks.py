"""Writes the walk of an exact, a planned and a long call: `python -m tests.conformance.walks docs/results/walks.md`."""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from adaattn_hf import remove_plan
from adaattn_hf._files import write_atomically
from adaattn_hf.eval.provenance import provenance
from tests.unit.test_planned_call import LAYERS, LENGTH, logits, planned, tokens

ROOT = f"{Path(__file__).resolve().parents[2]}/"


def walk(name: str, model: Any, ids: torch.Tensor, **inputs: Any) -> tuple[str, str]:
    """A row of counts and a table of what the last layer's call enters."""
    codes: list[CodeType] = []
    returns, nouns, inside = 0, set[str](), False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal returns, inside
        code, caller = frame.f_code, frame.f_back
        if code.co_name == "adaattn" and event in ("call", "return"):
            inside = event == "call" and frame.f_locals["module"].layer_idx == LAYERS - 1
        if inside and event == "call" and code.co_filename.startswith(ROOT) and "/.venv/" not in code.co_filename:
            moved = caller is not None and caller.f_code.co_filename != code.co_filename
            returns += moved and any(code.co_filename == entered.co_filename for entered in codes)
            codes.extend([code] * (code not in codes and not code.co_name.startswith("<")))
            named = [frame.f_globals.get(one) for one in code.co_names]
            nouns.update(one.__name__ for one in named if isinstance(one, type) and "adaattn" in one.__module__)

    logits(model, ids, **inputs)  # the second call of a kind is the one that others are like
    sys.setprofile(note)
    logits(model, ids, **inputs)
    sys.setprofile(None)
    rows = [f"| `{one.co_filename.removeprefix(ROOT)}` | {one.co_firstlineno} | `{one.co_name}` |\n" for one in codes]
    head = f"\n## {name}\n\nNouns: {', '.join(sorted(nouns))}.\n\n| file | line | function |\n|---|---:|---|\n"
    files = len({code.co_filename for code in codes})
    return f"| {name} | {files} | {len(rows)} | {returns} | {len(nouns)} |\n", head + "".join(rows)


if __name__ == "__main__":
    padding, borders = torch.ones(1, LENGTH + 80).long(), torch.tensor([0, 30, LENGTH + 80]).int()
    padding[:, -10:] = 0
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "attention_mask": padding, "use_cache": False}
    long = walk("A planned call, packed, padded, beyond its lengths", planned(), tokens(LENGTH + 80, 1), **packed)
    short = walk("An exact call", remove_plan(planned()), tokens()), walk("A planned call", planned(), tokens())
    counts, tables = zip(*short, long, strict=True)
    about = f"""# Walks of a call

Made by `python -m tests.conformance.walks docs/results/walks.md`, commit {provenance(torch.device("cpu"))["commit"]}.
What Python enters in the attention call of a model's last layer, the second of its kind, on a processor with native
kernels. A return is a call into a file that the walk had left, a noun a class of ours that an entered function names.

| call | files | functions | returns | nouns |
|---|---:|---:|---:|---:|
"""
    write_atomically(Path(sys.argv[1]), about + "".join(counts) + "".join(tables))
