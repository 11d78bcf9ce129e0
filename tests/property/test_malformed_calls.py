"""Random calls that no caller should make, through every entrance: a small fixed part of what `make fuzz` searches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from adaattn_hf.backends.native.library import missing

from ..support import malformed as support
from ..support.malformed import Call, judge, malformed
from ..support.malformed_rules import (
    NativeCall,
    Stored,
    judge_native,
    judge_stored,
    native_calls,
    stored_calls,
)
from . import search

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=600)
@given(call=malformed())
def test_malformed_calls_are_refused_or_answered_by_the_formula(call: Call) -> None:
    assert judge(call)


@settings(max_examples=400)
@given(call=native_calls())
def test_malformed_rules_are_refused_or_followed(call: NativeCall) -> None:
    assert judge_native(call)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=300)
@given(call=stored_calls())
def test_malformed_tokens_are_refused_or_stored(call: Stored) -> None:
    assert judge_stored(call)


def test_the_judgement_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    given_ = {"query": query, "key": key, "value": value, "attention_mask": None, "scaling": 0.3}
    call = Call("eager", given_)
    assert judge(call) == "served"
    monkeypatch.setattr(support, "asked", lambda call, backend: torch.full((1, 5, 2, 8), 9.0))
    with pytest.raises(AssertionError, match="off by"):
        judge(call)
    with pytest.raises(AssertionError, match="served though it means nothing"):
        judge(Call("eager", {**given_, "key": key[..., :7]}))
    with pytest.raises(AssertionError, match="not-a-numbers were lost"):
        judge(Call("eager", {**given_, "key": key * float("nan")}))

    def unasked(call: Call, backend: str | None) -> torch.Tensor:
        return {}[backend]  # type: ignore[no-any-return]

    monkeypatch.setattr(support, "asked", unasked)
    with pytest.raises(AssertionError, match="stock answers, here KeyError"):
        judge(call)


def test_the_search_goes_on_where_it_was_and_counts_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = True

    def child(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        nonlocal crashed
        kind, seed, cases = (command[command.index(f"--{name}") + 1] for name in ("chunk", "seed", "cases"))
        if kind == "rules" and crashed:
            crashed = False
            return subprocess.CompletedProcess(command, -11, "", "Segmentation fault")
        found = search.chunk(kind, int(seed), int(cases), None)
        return subprocess.CompletedProcess(command, 0, f"{json.dumps(found)}\n", "")

    real = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **k: (child if "--chunk" in command else real)(command, **k)
    )
    done = search.search(10, 3, tmp_path / "state.json", None)
    assert sum(done["verdicts"]["valid"].values()) == done["verdicts"]["valid"]["served"] == 9
    assert done["verdicts"]["rules"] == {"crashed": 1}
    assert "Segmentation fault" in done["failed"][0]
    search.record(done, tmp_path)
    assert (
        "| malformed rules of the native kernels | 1 | 0 | 0 | 0 | 0 | 1 |"
        in (tmp_path / "fuzz.md").read_text()
    )
    monkeypatch.setattr(subprocess, "run", real)
    assert search.search(10, 3, tmp_path / "state.json", None) == done, "nothing is left to do"
