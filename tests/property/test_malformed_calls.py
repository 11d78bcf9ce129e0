"""Random calls that no caller should make, through every entrance: a small fixed part of what `make fuzz` searches."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.library import missing
from adaattn_hf.patches.mask.structured_mask import StructuredMask

from ..support import malformed as support
from ..support.malformed import Call, judge, malformed
from ..support.malformed_rules import NativeCall, Stored, judge_native, judge_stored, native_calls, stored_calls
from . import search
from .searching import kinds, page

pytestmark = pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=600)
@given(call=malformed())
def test_malformed_calls_are_refused_or_answered_by_the_formula(call: Call) -> None:
    assert judge(call)


def found(backend: str | None, heads: int, q_len: int, kv_len: int, size: int, size_v: int, **given: object) -> Call:
    draw = torch.Generator().manual_seed(0)
    shapes = {"query": (heads, q_len, size), "key": (1, kv_len, size), "value": (1, kv_len, size_v)}
    tensors = {name: torch.randn(2, *shape, generator=draw) for name, shape in shapes.items()}
    return Call(backend, {**tensors, "attention_mask": None, "scaling": 0.3, **given})


@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("shape", [(1, 8, 17, 8, 5), (3, 1, 7, 16, 16), (9, 1, 1, 3, 5), (3, 1, 1, 16, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_few_keys_lose_no_not_a_number(name: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """What torch's own kernel loses among fewer keys than a vector holds."""
    for structured in (False, True):
        call = found("sdpa" if dtype is torch.float32 else None, *shape)
        call.given[name] = support.spotted(call.given[name], float("nan")).to(dtype)
        if structured:
            seen = MaskStructure(2, shape[1], shape[2], causal=True, q_offset=shape[2] - shape[1])
            call.given["attention_mask"] = StructuredMask(seen, torch.device("cpu"))
        assert judge(call) == "served"


def test_a_mask_and_a_bias_in_half_precision_are_added_in_that_of_the_queries() -> None:
    half = torch.randn(2, 2, 16, 17).mul(3).bfloat16()
    for backend in ("native", "sdpa", "eager"):
        call = found(backend, 2, 16, 17, 20, 20, attention_mask=half, position_bias=half.flip(3) / 7)
        truth = support.meaning(call)[0]
        assert (support.asked(call, backend) - truth).abs().max() < 1e-5


@pytest.mark.parametrize(
    "bias", [torch.zeros(1, 0, 1, 70), torch.zeros(3, 1, 1, 70), torch.zeros(1, 1, 1, 1, 70)],
    ids=["empty", "other rows", "five"],
)  # fmt: skip
def test_a_bias_that_fits_no_score_is_refused_beside_a_mask(bias: torch.Tensor) -> None:
    call = found("eager", 2, 1, 70, 8, 8, attention_mask=torch.zeros(2, 2, 1, 70), position_bias=bias)
    with pytest.raises(ValueError, match=r"^position_bias: got shape .* expected one that broadcasts to \(2, 2, 1, 70"):
        support.asked(call, "eager")


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
    monkeypatch.setattr(support, "asked", lambda call, backend: {}[backend])
    with pytest.raises(AssertionError, match="stock answers, here KeyError"):
        judge(call)


def test_the_search_goes_on_where_it_was_and_counts_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = True

    def child(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        nonlocal crashed
        kind, seed, cases = (command[command.index(f"--{name}") + 1] for name in ("chunk", "seed", "cases"))
        if kind == "rules" and crashed:
            crashed = False
            return subprocess.CompletedProcess(command, -11, "", "Segmentation fault")
        found = kinds.chunk(kind, int(seed), int(cases))
        return subprocess.CompletedProcess(command, 0, f"{json.dumps(found)}\n", "")

    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **k: (child if "--chunk" in command else real)(command, **k))
    done = search.search(10, 3, tmp_path / "state.json", None)
    assert sum(done["verdicts"]["valid"].values()) == done["verdicts"]["valid"]["served"] == 9
    assert done["verdicts"]["rules"] == {"crashed": 1}
    assert "Segmentation fault" in done["failed"][0]
    page.record(done, tmp_path)
    assert "| malformed rules of the native kernels | 1 | 0 | 0 | 0 | 0 | 0 | 1 |" in (tmp_path / "fuzz.md").read_text()
    monkeypatch.setattr(subprocess, "run", real)
    assert search.search(10, 3, tmp_path / "state.json", None) == done, "nothing is left to do"
