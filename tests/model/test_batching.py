"""Continuous batching by Transformers' own engine: its tokens are those of `generate`, exact and under a plan."""

import copy
import sys
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.generation.continuous_batching.initialization import decide_use_async_batching
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs as Buffers
from transformers.generation.continuous_batching.model_runner import ModelRunner

import adaattn_hf
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.reference import attention
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.call import batching
from adaattn_hf.patches.call.batching import attend_requests, engine_settings
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.patches.registry import engine_name
from adaattn_hf.plans.choices import Choice, Window

from ..support.models import assert_same, fresh_pair, pair, tokens
from ..support.plans import plan_for
from ..support.versions import PAGE, since

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("gpt2", "llama", "qwen2-hybrid", "mistral-window", "gemma2-softcap", "gemma3-hybrid", "gpt-oss-sinks")
NARROW = Choice.of(Window(6, sinks=2))
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (4, 2, 7, 33, 20, 18)]
NEW = 10


def one_by_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    settings = tf.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    return [model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist() for ids in prompts]


def together(
    model: Any, prompts: list[list[int]], new: int = NEW, engine: Any = None, manager: Any = (), **asked: Any
) -> list[list[int]]:
    """Tokens of `generate_batch`; prompts longer than 16 tokens are read in pieces, if nothing else is said.

    `engine` are the settings of the block, those of the engine itself without it; `manager` are other arguments.
    """
    settings = tf.GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
    engine = engine or tf.ContinuousBatchingConfig()
    for name, value in {"num_blocks": 64, PAGE: 32, "max_batch_tokens": 16, **asked}.items():
        setattr(engine, name, value)
    found = model.generate_batch(
        prompts, settings, continuous_batching_config=engine, progress_bar=False, **dict(manager)
    ).values()
    for error in filter(None, (answer.error for answer in found)):
        raise ValueError(error)  # some versions note in the answers what a step raised
    return [answer.generated_tokens for answer in found]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_generate(name: str) -> None:
    stock, ours = pair(name)
    with adaattn_hf.continuous_batching(ours):
        found = together(ours, PROMPTS)
    assert found == one_by_one(ours, PROMPTS) == one_by_one(stock, PROMPTS)
    assert ours.config._attn_implementation == "adaattn"


@pytest.mark.parametrize(("name", "backend", "length"), [
    *((name, "", 20) for name in FAMILIES), ("gemma3-hybrid", "", 64), ("llama", "_sdpa", 64), ("llama", "_eager", 20),
])  # fmt: skip
def test_planned_tokens_are_those_of_planned_generate(name: str, backend: str, length: int) -> None:
    """Of a plan for 20 tokens some prompts stay within it, some pass it, and some are longer."""
    stock, ours = fresh_pair(name, f"adaattn{backend}")
    load_plan(ours, plan_for(ours, NARROW, lengths=(length,)), unverified=True)
    with adaattn_hf.continuous_batching(ours):
        found = together(ours, PROMPTS)
    assert found == one_by_one(ours, PROMPTS)
    if name != "mistral-window":  # whose own window is narrower
        assert found != one_by_one(stock, PROMPTS), "the plan changed nothing"


@pytest.mark.parametrize("planned", [False, True])
def test_shared_prefixes_and_requests_that_wait(planned: bool) -> None:
    """With room for few blocks requests are put off and read again; prompts begin alike for more than a block."""
    _, ours = fresh_pair("llama")
    if planned:
        load_plan(ours, plan_for(ours, NARROW), unverified=True)
    prefix = tokens(1, 40, seed=9)[0].tolist()
    prompts = [[*prefix, *ids] for ids in PROMPTS[:3]] + PROMPTS[:4]
    with adaattn_hf.continuous_batching(ours):
        found = together(ours, prompts, num_blocks=6)
    assert found == one_by_one(ours, prompts)


@pytest.mark.parametrize("length", [None, 64, 20])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_steps_over_tables_of_pages(name: str, length: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token each read pages that the engine's cache holds, and write their own into them."""
    steps: list[int] = []
    gathered = batching._gathered

    def noted(*given: Any) -> Tensor:
        steps.append(1)
        return gathered(*given)

    monkeypatch.setattr(batching, "_gathered", noted)
    _, ours = fresh_pair(name)
    if length is not None:
        load_plan(ours, plan_for(ours, NARROW, lengths=(length,)), unverified=True)
    with adaattn_hf.continuous_batching(ours) as engine:
        found = together(ours, PROMPTS, engine=engine, max_blocks_per_request=3)
    assert found == one_by_one(ours, PROMPTS)
    assert len(steps) > NEW


def test_where_layers_slide_the_engine_has_no_tables() -> None:
    _, ours = fresh_pair("gemma3-hybrid")
    with adaattn_hf.continuous_batching(ours) as engine:
        found = together(ours, PROMPTS, engine=engine, max_blocks_per_request=3)
    assert found == one_by_one(ours, PROMPTS)
    copied = copy.deepcopy(replace(engine, num_blocks=8))
    copied.max_blocks_per_request = 0
    assert copied.max_blocks_per_request == 0


def test_settings_leave_tables_to_the_engine_in_its_own_copy_alone() -> None:
    _, ours = fresh_pair("llama")
    with adaattn_hf.continuous_batching(ours) as engine:
        engine.max_blocks_per_request = 3
        copied = copy.deepcopy(engine)
        copied.max_blocks_per_request = 0
        assert copied.max_blocks_per_request == 3
        engine.max_blocks_per_request = 0
        assert copy.deepcopy(engine).max_blocks_per_request == 0


def test_more_requests_at_once_than_rows_that_are_computed_precisely() -> None:
    _, ours = fresh_pair("llama")
    load_plan(ours, plan_for(ours, NARROW), unverified=True)
    prompts = [tokens(1, 3 + length % 5, seed=length)[0].tolist() for length in range(24)]
    with adaattn_hf.continuous_batching(ours):
        found = together(ours, prompts, max_batch_tokens=64)
    assert found == one_by_one(ours, prompts)


def test_a_manager_serves_requests_that_come_later() -> None:
    _, ours = fresh_pair("llama")
    settings = tf.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=-1)
    with adaattn_hf.continuous_batching(ours) as engine:
        engine.num_blocks, engine.max_batch_tokens = 16, 16
        manager = ours.init_continuous_batching(generation_config=settings, continuous_batching_config=engine)
        manager.start()
        found = []
        for ids in PROMPTS[:3]:
            manager.add_request(ids, max_new_tokens=NEW)
            while (answer := manager.get_result(timeout=600)) is not None and not answer.is_finished():
                pass
            found.append(answer.generated_tokens)
        manager.stop(block=True)
    assert found == one_by_one(ours, PROMPTS[:3])


def test_graphs_of_the_engine_leave_attention_out() -> None:
    """`torch.compile` of its steps: lengths are read on the host, so that attention runs between two graphs."""
    _, ours = fresh_pair("llama", num_hidden_layers=1)
    compiled = tf.CompileConfig(backend="eager", fullgraph=False, dynamic=True)
    compiled._compile_all_devices = True  # type: ignore[assignment]
    with adaattn_hf.continuous_batching(ours):
        found = together(ours, PROMPTS, varlen_compile_config=compiled)
    assert found == one_by_one(ours, PROMPTS)


def test_the_block_gives_the_name_back() -> None:
    stock, ours = fresh_pair("llama", "adaattn_eager")
    with adaattn_hf.continuous_batching(ours):
        assert ours.config._attn_implementation == engine_name("adaattn_eager")
        with pytest.raises(ValueError, match="one block at a time"), adaattn_hf.continuous_batching(ours):
            pass
    with pytest.raises(ValueError, match="leave the block"), adaattn_hf.continuous_batching(ours):
        ours.generate(tokens(1, 4), max_new_tokens=2)
    assert ours.config._attn_implementation == "adaattn_eager"
    with pytest.raises(ValueError, match="got attention 'eager', expected 'adaattn'"):
        adaattn_hf.continuous_batching(stock).__enter__()


def test_a_copy_from_inside_the_block_runs_by_the_remedy_of_its_refusal() -> None:
    _, ours = fresh_pair("llama")
    with adaattn_hf.continuous_batching(ours):
        copied = copy.deepcopy(ours)
    with pytest.raises(ValueError, match=r'copied\.set_attn_implementation\("adaattn"\)'):
        copied(tokens(1, 4))
    copied.set_attn_implementation("adaattn")
    assert torch.equal(copied(tokens(1, 4)).logits, ours(tokens(1, 4)).logits)


def test_a_name_that_is_set_in_the_block_stays() -> None:
    _, ours = fresh_pair("llama")
    with adaattn_hf.continuous_batching(ours):
        ours.set_attn_implementation("sdpa")
    assert ours.config._attn_implementation == "sdpa"


def test_a_tower_of_stock_attention_stays_as_it_is() -> None:
    _, ours = fresh_pair("llama")
    stock, _ = fresh_pair("llama")
    both = torch.nn.ModuleList([ours, stock])
    with adaattn_hf.continuous_batching(both):
        assert ours.config._attn_implementation == engine_name("adaattn")
        assert stock.config._attn_implementation == "eager"
    assert (ours.config._attn_implementation, stock.config._attn_implementation) == ("adaattn", "eager")


def test_a_plan_of_another_thread_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    _, ours = fresh_pair("llama")
    with adaattn_hf.continuous_batching(ours), adaattn_hf.use_plan(ours, None), pytest.raises(Exception) as raised:
        together(ours, PROMPTS[:1])
    assert "use_plan: generate_batch()" in f"{raised.value}{caplog.text}"


@since("5.19", "the engine takes any name there")
def test_outside_the_block_the_engine_refuses() -> None:
    _, ours = fresh_pair("llama")
    with pytest.raises(ValueError, match="adaattn is not supported for continuous batching"):
        together(ours, PROMPTS[:1])


class Paged:
    """The engine's cache of Transformers 5.17: keys and values of all requests lie behind one another."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Any, write_index: Any
    ) -> tuple[Tensor, Tensor]:
        return self.key, self.value


@pytest.mark.parametrize("engine_writes", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_step_is_attention_request_by_request(window: int | None, engine_writes: bool) -> None:
    module: Any = torch.nn.Module()
    module.layer_idx, module.sliding_window = 0, window
    query = torch.randn(1, 4, 9, 16)
    key, value = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    q_borders, k_borders = torch.tensor([0, 4, 5, 7, 8]), torch.tensor([0, 4, 10, 16, 19])
    lengths: dict[str, Any] = {"cu_seq_lens_q": q_borders, "cu_seq_lens_k": k_borders, "read_index": []}
    if not engine_writes:
        kinds = ("full_attention", "sliding_attention")
        lengths |= {"cu_seq_lens_k": dict.fromkeys(kinds, k_borders), "write_index": []}
        lengths["cache"] = Paged(*(t[0].transpose(0, 1) for t in (key, value)))
    new = (key, value) if engine_writes else (query[:, :2], query[:, :2])
    out, _ = attend_requests(None, module, query, *new, **lengths)
    for q, q_end, k, k_end in ((0, 4, 0, 4), (4, 5, 4, 10), (5, 7, 10, 16), (7, 8, 16, 19)):
        past = (k_end - k) - (q_end - q)
        structure = MaskStructure(1, q_end - q, k_end - k, causal=True, q_offset=past, window=window)
        alone = AttentionCall(query[:, :, q:q_end], key[:, :, k:k_end], value[:, :, k:k_end], structure, 0.25)
        assert_same(attention(alone).out.float(), out[:, q:q_end])
    assert not out[:, 8:].any(), "what belongs to no request is zero"


STEP: dict[str, Any] = {
    "cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 8]), "read_index": []
}  # fmt: skip


@pytest.mark.parametrize(("keywords", "words"), [
    ({"alibi": torch.ones(4)}, "^alibi: got Tensor from Module"),
    ({"position_bias": torch.ones(1)}, "^position_bias: got Tensor"),
    ({"sinks": torch.ones(4)}, "^sinks: got Tensor"),
    ({"attention_mask": torch.ones(1, 1, 8, 16)}, "^attention_mask: got a mask in a step"),
    ({"dropout": 0.5}, r"^dropout: got 0\.5 in a step"),
    ({"is_causal": False}, "^is_causal: got False in a step"),
    ({"cu_seq_lens_q": torch.tensor([0, 9])}, "^cu_seqlens_q: got .* at most 8 tokens"),
    ({"cu_seq_lens_q": None}, "leave the block for everything else"),
    ({"read_index": None}, "leave the block for everything else"),
])  # fmt: skip
def test_what_a_step_does_not_serve_is_refused(keywords: dict[str, Any], words: str) -> None:
    query = torch.randn(1, 4, 8, 16)
    with pytest.raises(ValueError, match=words):
        attend_requests(None, torch.nn.Module(), query, query, query, **{**STEP, **keywords})


def test_a_step_is_not_transformed() -> None:
    def step(query: Tensor) -> Tensor:
        return attend_requests(None, torch.nn.Module(), query, query, query, **STEP)[0]

    with pytest.raises(RuntimeError, match=r"generate_batch: called under torch\.func"):
        torch.func.vmap(step)(torch.randn(2, 1, 4, 8, 16))


@pytest.mark.parametrize("name", ["llama", "gemma3-hybrid"])
@pytest.mark.parametrize("planned", [False, True])
def test_lengths_are_read_once_in_a_forward_pass(name: str, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host waits for each: once for queries, once for keys of each kind of layer, however many layers."""
    _, ours = fresh_pair(name)
    if planned:  # of one layer: those of the other are other parts of a step
        load_plan(ours, plan_for(ours, NARROW, layers=(0,)), unverified=True)
    reads: list[int] = []
    passes: list[int] = []
    read = Tensor.tolist

    def counted(sums: Tensor) -> list[int]:
        if sys._getframe(1).f_globals["__name__"] == attend_requests.__module__:
            reads.append(len(sums))
        return read(sums)

    monkeypatch.setattr(Tensor, "tolist", counted)
    ours.register_forward_pre_hook(lambda *_: passes.append(1))
    with adaattn_hf.continuous_batching(ours):
        together(ours, PROMPTS)
    assert len(passes) > NEW
    # under a plan a layer that slides reads where its tokens stand, too
    assert len(reads) == len(passes) * (2 if name == "llama" else 3 + planned)


def test_lengths_that_are_written_again_are_read_again() -> None:
    """The engine may keep its tensors of lengths from step to step."""
    query, borders = torch.randn(1, 4, 8, 16), torch.tensor([0, 8])
    module = torch.nn.Module()
    told = {**STEP, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
    first, _ = attend_requests(None, module, query, query, query, **told)
    again, _ = attend_requests(None, module, query, query, query, **told)
    assert torch.equal(first, again)
    borders[1] = 5
    shorter, _ = attend_requests(None, module, query, query, query, **told)
    assert torch.equal(shorter[:, :5], first[:, :5])
    assert not shorter[:, 5:].any()


@pytest.mark.parametrize("manager", [{"warmup": False}, {"persistent_manager": True}], ids=["new", "started again"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_settings_wait_between_clearing_buffers_and_filling_them(
    name: str, manager: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the engine does the one on a stream that the other does not wait for, and again behind warming up."""
    _, ours = fresh_pair(name)
    order: list[str] = []
    again = "persistent_manager" in manager  # and steps are padded, as where they are captured
    monkeypatch.setattr(batching, "_wait_for_stream", lambda: order.append("wait"))
    monkeypatch.setattr(ModelRunner, "pad_inputs", property(lambda _: again, lambda *_: None), raising=False)

    def noted(buffers: Any, step: str, done: Any, *given: Any, **named: Any) -> None:
        order.append(step)
        done(buffers, *given, **named)
        order.append(step)

    for method, step in {"__init__": "clear", "reset": "clear", "prepare_batch_tensors": "fill"}.items():
        monkeypatch.setattr(Buffers, method, partialmethod(noted, step, getattr(Buffers, method)))
    with adaattn_hf.continuous_batching(ours) as engine:
        engine.q_padding_interval_size = engine.kv_padding_interval_size = 1
        for prompts in (PROMPTS[:1], PROMPTS[:2], [[5]])[: 1 + 2 * again]:
            order.clear()
            together(ours, prompts, engine=engine, manager=manager, max_blocks_per_request=4)
            assert "wait" in "".join(order[: order.index("fill")]).rpartition("clear")[2]


@pytest.mark.parametrize("graphs", [(False, True), False])
def test_asynchronous_batching_goes_with_graphs(graphs: Any) -> None:
    """As a server asks for it that has no word for the one, `transformers serve --no-cb-use-cuda-graph`."""
    weight = SimpleNamespace(device=torch.device("cuda"))
    model: Any = SimpleNamespace(config=tf.LlamaConfig(), parameters=lambda: iter([weight]))
    settings = copy.deepcopy(engine_settings(model))
    assert settings.max_blocks_per_request != 0
    settings.use_cuda_graph = graphs
    decide_use_async_batching(settings, is_attn_mask_needed=False)
    assert settings.use_async_batching is any(settings.cuda_graph_booleans) is bool(graphs)
