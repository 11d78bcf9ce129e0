"""The random search finds what it is for: a fixed part of it passes, and with a fix taken out it reports the fault."""

import itertools
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.errors import UnsatisfiedAssumption

from adaattn_cli import verify as verify_command
from adaattn_hf.attention import stored
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.backends import select
from adaattn_hf.backends.native.library import missing
from adaattn_hf.patches.cache import disk
from adaattn_hf.patches.call import batching, extended, interface
from adaattn_hf.patches.mask import documents, masks
from adaattn_hf.patches.models import families
from adaattn_hf.patches.plans import bound, check, hashes, snapshot
from adaattn_hf.patches.unpad import check as unpad_check
from adaattn_hf.patches.unpad.packing import PackedPrefill
from tests.support import malformed, valid
from tests.support.doors import HUB
from tests.support.kernels import kernel
from tests.support.versions import since_5_23

from .searching import again, beyond, changed, files, graphs, oracle, twins, ways, whole
from .searching.drawing import Drawing
from .searching.inputs import Inputs
from .searching.whole import Whole

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present"),
    pytest.mark.filterwarnings("ignore"),
]


@settings(max_examples=60)
@given(case=whole.wholes())
def test_models_compute_what_stock_attention_computes(case: whole.Whole) -> None:
    assert oracle.judge(case)


IDS, PLACES = torch.tensor([[13, 24, 49, 18, 46]]), torch.tensor([[6, 8, 10, 12, 14]])
LOWER = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
CODED = Inputs(IDS, PLACES, LOWER, None, (4, 1), "int8")
FLIPPED = Whole("phimoe", "adaattn_eager", CODED, torch.float32, torch.float32, prepared=False)
"""A call in which the rounding of a cache sends one token to another expert."""


def test_codes_are_compared_among_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert oracle.judge(FLIPPED) == "served"
    real = stored.dequantise
    with monkeypatch.context() as planted:
        planted.setattr(stored, "dequantise", lambda codes, scale: -real(codes, scale))
        with pytest.raises(AssertionError, match="codes lead"):
            oracle.judge(FLIPPED)
    monkeypatch.setattr(oracle, "routing", lambda *_, **__: nullcontext())
    with pytest.raises(AssertionError, match="codes lead"):
        oracle.judge(FLIPPED)


def test_documents_that_come_too_late_for_chunks_in_a_graph_are_a_sentence() -> None:
    """That sentence counts as an answer where the model has chunks; without chunks the call is served."""
    words = {"positions": "packed", "mask": "ones", "cache": "off", "pieces": (1,), "rows": 1}
    ids, borders = torch.arange(3, 27)[None], torch.tensor([0, 10, 24], dtype=torch.int32)
    given = Inputs(ids, None, torch.ones_like(ids), borders, (1,), "off", words)
    verdicts = []
    for family in ("llama4_text", "llama"):
        case = Whole(family, "adaattn_sdpa", given, torch.float32, torch.float32, prepared=False)
        verdicts.append(graphs.judge(graphs.Graphed("compiled", case, given)))
    assert verdicts == ["refused", "served"]


@settings(max_examples=5)
@given(case=graphs.graphed())
def test_graphs_of_models_do(case: graphs.Graphed) -> None:
    assert graphs.judge(case)


@settings(max_examples=200)
@given(call=ways.ways())
def test_every_door_serves_every_way_or_says_why_not(call: ways.Way) -> None:
    assert ways.judge(call)


@settings(max_examples=200)
@given(call=again.repeated())
def test_what_is_remembered_answers_nothing_else(call: again.Again) -> None:
    assert again.judge(call)


@settings(max_examples=100)
@given(call=valid.calls((HUB,)))
def test_the_kernel_of_the_hub_is_attention(call: valid.Valid) -> None:
    assert valid.judge(call)


@settings(max_examples=200)
@given(call=malformed.malformed((HUB,)))
def test_the_kernel_of_the_hub_refuses_what_the_package_refuses(call: malformed.Call) -> None:
    assert malformed.judge(call)


@settings(max_examples=25)
@given(call=changed.changed())
def test_a_plan_runs_while_its_model_is_what_it_was(call: changed.Changed) -> None:
    assert changed.judge(call)


@settings(max_examples=150)
@given(call=files.saved())
def test_a_saved_cache_is_what_was_saved(call: files.Saved) -> None:
    assert files.judge(call)


NEW: dict[str, tuple[int, Any, Callable[[Any], str]]] = {
    "rows that are kept": (40, whole.wholes(keeps=True), oracle.judge),
    "rows that a graph keeps": (2, graphs.graphed(keeps=True), graphs.judge),
    "documents behind a cache": (150, ways.beside_a_cache(), ways.judge),
    "rows that see nothing": (200, ways.blind(), ways.judge),
    "plans past their lengths": (30, beyond.beyond(), beyond.judge),
    "plan files": (60, files.edited(("load_plan",)), files.judge_edited),
    "layers that moved": (30, changed.changed(changed.MOVES), changed.judge),
    "threads": (4, again.crowds(), again.judge_crowd),
    "families": (2, twins.any_family(), twins.judge_family),
}
"""What else is drawn here: how many cases, by what, and who judges them."""


@pytest.mark.parametrize("name", NEW)
def test_what_was_once_missed_is_drawn(name: str) -> None:
    cases, strategy, judge = NEW[name]
    draw, judged = Drawing(name), 0
    while judged < cases:
        try:
            case = draw(strategy)
        except UnsatisfiedAssumption:
            continue
        assert judge(case), case
        judged += 1


def reported(
    strategy: Any, judge: Callable[[Any], str], most: int, only: Callable[[Any], bool] = lambda _: True
) -> str:
    draw = Drawing("planted")
    for _ in range(most):
        try:
            case = draw(strategy)
        except UnsatisfiedAssumption:
            continue
        if not only(case):
            continue
        try:
            judge(case)
        except AssertionError as error:
            return f"{case!r}: {error}"
    return ""


def forward_of_the_kernel() -> ModuleType:
    """The module of the Hub's kernel that a model calls."""
    return sys.modules[kernel("adaattn").flash_attn_forward.__module__]


def borderless(case: whole.Whole) -> bool:
    """Whether positions could be taken for documents."""
    return case.family in oracle.BORDERLESS and case.given.positions is not None and case.given.cache != "int8"


def test_it_reports_positions_that_overrule_a_mask_or_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    told = masks.caller_arguments
    monkeypatch.setattr(masks, "caller_arguments", lambda: (True, told()[1]))
    assert "off by" in reported(whole.wholes(), oracle.judge, 900, borderless)


def test_it_reports_positions_that_are_taken_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_any_step(structure: Any, positions: torch.Tensor) -> Any:
        border = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        if not (structure.causal and structure.plain) or structure.q_len != structure.kv_len:
            return structure
        documents = border.cumsum(1)
        return structure.with_changes(q_segments=documents, k_segments=documents)

    monkeypatch.setattr(masks, "with_restarts", by_any_step)
    assert "off by" in reported(whole.wholes(), oracle.judge, 900, borderless)


def test_it_reports_rows_that_are_read_across(monkeypatch: pytest.MonkeyPatch) -> None:
    real = documents.with_restarts

    def in_one_row(structure: Any, positions: torch.Tensor) -> Any:
        return real(structure, positions) if structure.batch == 1 else structure

    monkeypatch.setattr(masks, "with_restarts", in_one_row)

    def rows(case: whole.Whole) -> bool:
        told = case.given.mask is None and case.given.cache == "off"
        return borderless(case) and told and len(case.given.ids) > 1

    assert "off by" in reported(whole.wholes(), oracle.judge, 9000, rows)


def test_it_reports_a_graph_that_keeps_what_one_mask_hid(monkeypatch: pytest.MonkeyPatch) -> None:
    def hides_nothing(attention_mask: Any, length: int) -> bool:
        return attention_mask.shape[1] >= length and bool(attention_mask.all())

    monkeypatch.setattr(masks, "_hides_nothing", hides_nothing)

    def traced(case: graphs.Graphed) -> bool:
        words = case.first.given.words
        return case.way == "traced" and words["mask"] == "ones" and words["positions"] != "packed"

    assert "call 2: off by" in reported(graphs.graphed(), graphs.judge, 600, traced)


@pytest.mark.parametrize(("guard", "instead", "told"), [
    ("check_call", lambda *_: None, "served with"),
    ("with_documents", lambda structure, *_: structure, "off by"),
    ("transform_at_work", lambda: None, ""),
])  # fmt: skip
def test_it_reports_a_door_without_a_guard(
    monkeypatch: pytest.MonkeyPatch, guard: str, instead: Any, told: str
) -> None:
    monkeypatch.setattr(forward_of_the_kernel(), guard, instead)
    found = reported(ways.ways(), ways.judge, 300, lambda call: call.door == HUB)
    assert found
    assert told in found


def test_it_reports_models_whose_documents_a_door_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_of_the_kernel(), "with_documents", lambda structure, *_: structure)

    def packed(case: whole.Whole) -> bool:
        return case.implementation == oracle.KERNEL and case.given.borders is not None

    assert "off by" in reported(whole.wholes(), oracle.judge, 4000, packed)


def test_it_reports_masks_that_a_door_reads_as_numbers_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_of_the_kernel(), "check_dense", lambda *_: None)

    def flat(call: malformed.Call) -> bool:
        mask = call.given["attention_mask"]
        return isinstance(mask, torch.Tensor) and mask.dim() == 2

    assert reported(malformed.malformed((HUB,)), malformed.judge, 4000, flat)


def test_it_reports_a_launch_that_keeps_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    real = select.store_kernel

    def keeping(kernels: Any, kind: Any, made: Any) -> Any:
        keys: list[torch.Tensor] = []

        def kernel_with_a_key(call: AttentionCall) -> Any:
            keys.append(call.key)
            return made(replace(call, key=keys[0]))

        return real(kernels, kind, made if made is None else kernel_with_a_key)

    monkeypatch.setattr(select, "plain_kernels", {})
    monkeypatch.setattr(select, "store_kernel", keeping)

    def other_keys(call: again.Again) -> bool:
        return call.first.backend == "sdpa" and call.then.changes == ["key backwards along 2"]

    assert "off by" in reported(again.repeated(), again.judge, 4000, other_keys)


def test_it_reports_rows_of_padding_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = interface.attend_ordinary

    def attend_ordinary(module: Any, call: Any, mask: Any, *given: Any) -> Any:
        out, structure = real(module, call, mask, *given), getattr(mask, "structure", None)
        hidden = None if structure is None else structure.key_padding
        if out is None or hidden is None or structure.q_len != structure.kv_len:
            return out
        return out * hidden[:, :, None, None]

    monkeypatch.setattr(interface, "attend_ordinary", attend_ordinary)

    def padded(case: whole.Whole) -> bool:
        return case.given.words["mask"] == "right" and case.implementation == "adaattn" and not case.prepared

    assert "off by" in reported(whole.wholes(), oracle.judge, 4000, padded)


def test_it_reports_codes_that_ask_for_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def hadamard(n: int, device: Any = "cpu") -> torch.Tensor:
        return real(n, device).to(torch.get_default_dtype())

    real = stored.hadamard
    monkeypatch.setattr(stored, "hadamard", hadamard)

    def coded(case: whole.Whole) -> bool:
        return case.given.cache == "int8" and case.default is torch.bfloat16

    assert "have the same dtype" in reported(whole.wholes(), oracle.judge, 4000, coded)


OUTLIVES: dict[str, tuple[str, Callable[..., Any], Any]] = {
    **dict.fromkeys(("columns", "buffers"), ("same_weights", lambda seen: True, snapshot.Snapshot)),
    "adapter merged": ("inner_of", lambda *_: None, snapshot),
    "settings": ("refuse_other_settings", lambda *_: None, (bound, check)),
    "layers": ("covers", lambda *_: True, snapshot.Snapshot),
    "set later": ("same", lambda seen: seen.same_weights(), snapshot.Snapshot),
}
"""What changes behind the first call, and which guard is taken out of where, by what stands for it."""


@pytest.mark.parametrize("change", OUTLIVES)
def test_it_reports_a_plan_that_outlives_its_model(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    guard, instead, holders = OUTLIVES[change]
    for holder in holders if isinstance(holders, tuple) else (holders,):
        monkeypatch.setattr(holder, guard, instead)
    kinds = changed.MOVES if change in changed.MOVES else changed.CHANGES

    def of_kind(call: changed.Changed) -> bool:
        return call.change == change and not call.loads

    found = reported(changed.changed(kinds), changed.judge, 2000, of_kind)
    assert "served, though the model computes otherwise" in found


def test_it_reports_a_hash_that_sees_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled(tensor: torch.Tensor) -> list[bytes]:
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // 65536)
        return [f"{tuple(tensor.shape)}".encode(), flat[::step].clone().view(torch.uint8).numpy().tobytes()]

    monkeypatch.setattr(hashes, "_of_tensor", sampled)

    def unseen(call: changed.Changed) -> bool:
        return call.wide and call.change in ("columns unseen", "columns elsewhere")

    assert "served, though" in reported(changed.changed(), changed.judge, 9000, unseen)


def test_it_reports_a_hash_that_leaves_buffers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "saved_weights", lambda module: dict(module.named_parameters()))
    found = reported(changed.changed(), changed.judge, 2000, lambda call: call.change == "buffers")
    assert "served, though" in found


def test_it_reports_files_without_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_checksum", lambda *_: "")
    files.original.cache_clear()
    try:
        assert "accepted, and off by" in reported(files.saved(), files.judge, 300)
    finally:
        files.original.cache_clear()


@since_5_23
def test_it_reports_borders_that_are_cut_by_the_rows_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = documents.with_documents
    for user in (masks, extended):
        monkeypatch.setattr(user, "with_documents", lambda rules, cu_q, cu_k, cut=0: real(rules, cu_q, cu_k))

    def sharing(case: whole.Whole) -> bool:
        return case.family in twins.SHARING and case.given.borders is not None and case.given.words["keep"] == 1

    assert "stock answers, here ValueError" in reported(whole.wholes(keeps=True), oracle.judge, 4000, sharing)


def test_plans_that_round_are_compared_at_the_positions_that_were_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code turns in these draws: what rounds the same numbers is as near as exact sums are."""
    monkeypatch.setitem(beyond.LOOSE, "int8", beyond.LOOSE[""])
    for places, told in ((beyond.places, ""), (lambda _, real: torch.arange(len(real)), "off by")):
        monkeypatch.setattr(beyond, "places", places)
        found = reported(beyond.beyond(), beyond.judge, 300, lambda case: beyond.INT8 in case.parts)
        assert told in found
        assert bool(told) == bool(found)


@pytest.mark.parametrize(("cache", "pieces", "keep"), [("static", (4, 1), 1), ("static", (3, 2), 2), ("off", (5,), 3)])
def test_the_last_queries_alone_stand_where_they_stood(cache: str, pieces: tuple[int, ...], keep: int) -> None:
    """Over shared keys and without a mask, by a name that Transformers does not know; a static cache has room."""
    calls = Inputs(IDS, None, None, None, pieces, cache, keep=keep)
    assert oracle.judge(Whole("gemma4_text", twins.KERNEL, calls, torch.float32, torch.float32, False)) == "served"


def test_it_reports_borders_that_are_taken_from_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    real = documents.with_documents
    for user in (masks, extended):
        monkeypatch.setattr(user, "with_documents", lambda rules, cu_q, cu_k, cut=0: real(rules, cu_q, cu_q))
    for said, words in (("the first continues", "off by"), (ways.TOLD[3], "served with")):
        found = reported(ways.beside_a_cache(), ways.judge, 600, lambda call, said=said: call.said == said)
        assert words in found


def test_it_reports_places_that_are_counted_from_the_first_key_held(monkeypatch: pytest.MonkeyPatch) -> None:
    real = batching._parts
    monkeypatch.setattr(masks, "_dropped", lambda *_: 0)
    monkeypatch.setattr(batching, "_parts", lambda cu_q, cu_k, _, *rest: real(cu_q, cu_k, None, *rest))
    for way in dict.fromkeys(beyond.WAYS):

        def forgets(call: beyond.Beyond, way: str = way) -> bool:
            return call.way == way and bool(call.parts) and call.limit < 24

        assert "off by" in reported(beyond.beyond(), beyond.judge, 900, forgets), way


def test_it_reports_a_verdict_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "unproven", lambda plan: None)
    assert "believed" in reported(files.edited(("load_plan",)), files.judge_edited, 300)


def test_it_reports_a_judge_who_takes_limits_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify_command._verdicts

    def lax(plan: Any, *given: Any) -> Any:
        verdicts, gates = real(plan, *given)
        return verdicts, replace(gates, **plan.protocol["gates"])

    assert not files.verified(files.plan_text("verify"))["passed"]  # judged before anything is planted
    monkeypatch.setattr(verify_command, "_verdicts", lax)

    def of_gates(call: files.Edited) -> bool:
        return call.path[:2] == ("protocol", "gates") and isinstance(call.value, float)

    assert "judged otherwise" in reported(files.edited(("verify",)), files.judge_edited, 2000, of_gates)


def test_it_reports_a_memory_that_threads_empty_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(kernels: Any, kind: Any, made: Any) -> Any:
        while len(kernels) >= select.MAX_KINDS:
            oldest = next(iter(kernels))
            time.sleep(0)
            del kernels[oldest]
        kernels[kind] = made
        return made

    monkeypatch.setattr(select, "store_kernel", unlocked)
    assert "in threads: KeyError" in reported(again.crowds(), again.judge_crowd, 20)


def test_it_reports_a_mask_that_is_scaled_before_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    real = select.attend

    def scaled(call: Any, backend: str | None = None) -> Any:
        if call.bias is not None:
            call = replace(call, bias=call.bias.float() * math.log2(math.e) / math.log2(math.e))
        return real(call, backend)

    monkeypatch.setattr(extended, "attend", scaled)
    found = reported(ways.blind(), ways.judge, 2000, lambda call: call.door is None and call.way == "called")
    assert "off by" in found


def test_it_reports_a_stand_in_for_a_cache_that_lacks_what_a_family_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_layers(cache: Any, target: Any, packed: Any) -> None:
        cache.target, cache.layout, cache.layers, cache.layer_class_to_replicate = target, packed, [], None

    real = unpad_check._shown_by_code
    monkeypatch.setattr(unpad_check, "_shown_by_code", lambda *of: [why for why in real(*of) if "indexer" not in why])
    monkeypatch.setattr(PackedPrefill, "__init__", without_layers)
    with pytest.raises(AssertionError, match="prepare: raw: "):
        twins.judge_family("deepseek_v32")


@since_5_23
def test_it_reports_sinks_of_each_token_that_nobody_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(families.UNROUTED, "inkling2")
    monkeypatch.setattr(families, "_refusal_of", families._refusal_of.__wrapped__)
    with pytest.raises(AssertionError, match="check lets pass"):
        twins.judge_family("inkling2_text")


def test_it_reports_calls_of_which_tracers_see_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "transform_at_work", lambda: None)
    # far off, or an error of the kernel that is called instead: which comes first depends on what ran before
    assert reported(ways.ways(), ways.judge, 4000, lambda call: (call.door, call.way) == (None, "traced"))


def test_the_same_seed_draws_the_same() -> None:
    for strategy in (ways.ways(), again.repeated(), whole.wholes()):
        first, second = (Drawing("1 0") for _ in range(2))
        pairs = []
        for draw in (first, second):
            drawn: list[str] = []
            while len(drawn) < 5:
                try:
                    drawn.append(repr(draw(strategy)))
                except UnsatisfiedAssumption:
                    continue
            pairs.append(drawn)
        assert all(a.split(" object at")[0] == b.split(" object at")[0] for a, b in itertools.zip_longest(*pairs))


@pytest.mark.parametrize("way", ["called", "compiled"])
def test_documents_of_which_shared_keys_leave_the_last_queries_under_the_hubs_kernel(way: str) -> None:
    """Called, they were refused; in a graph they were counted from the row's last tokens."""
    borders = torch.tensor([0, 5, 11], dtype=torch.int32)
    ids = torch.randint(3, 60, (1, 11), generator=torch.Generator().manual_seed(0))
    words = {"positions": "packed", "mask": "none", "cache": "off", "pieces": (11,), "rows": 1, "keep": 3}
    given = Inputs(ids, None, None, borders, (11,), "off", words, keep=3)
    case = Whole("gemma4_text", "hub_adaattn", given, torch.float32, torch.float32, False)
    verdict = oracle.judge(case) if way == "called" else graphs.judge(graphs.Graphed(way, case, given))
    assert verdict == "served"
