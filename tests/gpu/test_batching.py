"""Continuous batching on a CUDA device: tokens of `generate`, steps against the reference, captured steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import adaattn_hf
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.base import capturing
from adaattn_hf.patches.call import batching
from adaattn_hf.patches.call.batching import attend_requests
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.plans.choices import Choice, Window

from ..model.test_batching import together
from ..support.head_rules import rules
from ..support.plans import plan_for
from ..support.versions import PAGE, since
from ..unit.test_triton_pages import attend, paged, truth

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
LENGTHS, NEW = (5, 300, 40, 1, 130), 16
ENGINE = {PAGE: 256, "max_batch_tokens": 128}
BUSY = 10**9
"""Cycles of a device: some half a second."""


def model(**changes: Any) -> Any:
    """A LLaMA of two layers whose weights are wide enough that every key counts."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    config = tf.MistralConfig(**sizes, sliding_window=changes.pop("window", None), **changes)
    return tf.MistralForCausalLM._from_config(config, attn_implementation="adaattn").eval().cuda()


@pytest.mark.parametrize(("graphs", "ahead"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("planned", [False, True])
def test_tokens_are_those_of_generate(
    planned: bool, window: int | None, graphs: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps captured or not, prepared ahead or one after the other; where no layer slides they read pages."""
    read: list[bool] = []
    pages = batching._pages

    def noted(borders: Tensor, *given: Any) -> Any:
        read.append(capturing(borders.device))
        return pages(borders, *given)

    monkeypatch.setattr(batching, "_pages", noted)
    monkeypatch.setattr(batching, "_gathered", lambda *given: pytest.fail("pages were gathered"))
    found = model(window=window)
    if planned:
        # sliding layers count from the first key that they still hold, so that pieces of a prompt lie within the plan
        lengths = (200 if window is None else 400,)
        load_plan(found, plan_for(found, Choice.of(Window(24, sinks=4)), lengths=lengths), unverified=True)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]
    with adaattn_hf.continuous_batching(found) as engine:
        engine.use_cuda_graph, engine.use_async_batching = (False, graphs), ahead
        answers = together(found, prompts, NEW, engine, **ENGINE)
    settings = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    right = [found.generate(torch.tensor([ids]).cuda(), **settings)[0, len(ids) :].tolist() for ids in prompts]
    assert answers == right
    assert set(read) == (set() if window else {False, True} if graphs else {False})


@pytest.mark.parametrize("window", [None, 32])
def test_a_busy_device_does_not_clear_the_first_inputs(window: int | None) -> None:
    """Where it is busy while the engine starts, and the first step comes late, as beside other processes."""
    found, prompt = model(window=window), torch.randint(3, 64, (130,), generator=torch.Generator().manual_seed(0))
    settings = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    right = found.generate(prompt[None].cuda(), **settings)[0, 130:].tolist()
    late = iter([4 * BUSY])
    found.register_forward_pre_hook(lambda *_: torch.cuda._sleep(next(late, 1)))
    with adaattn_hf.continuous_batching(found) as engine:
        engine.use_cuda_graph, engine.use_async_batching = False, True
        torch.cuda._sleep(BUSY)
        assert together(found, [prompt.tolist()], NEW, engine, **ENGINE) == [right]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
def test_a_step_is_attention_request_by_request(window: int | None, dtype: torch.dtype) -> None:
    queries, keys = [200, 1, 64, 1, 1, 7], [200, 700, 300, 1, 65, 1000]
    cu_q, cu_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (queries, keys))
    query = torch.randn(1, 8, cu_q[-1], 128, device="cuda", dtype=dtype)
    key, value = (torch.randn(1, 2, cu_k[-1], 128, device="cuda", dtype=dtype) for _ in range(2))
    told = {"cu_seq_lens_q": torch.tensor(cu_q).cuda(), "cu_seq_lens_k": torch.tensor(cu_k).cuda(), "read_index": []}
    out, _ = attend_requests(None, torch.nn.Module(), query, key, value, sliding_window=window, **told)
    for n, (q_len, k_len) in enumerate(zip(queries, keys, strict=True)):
        q, k = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        structure = MaskStructure(1, q_len, k_len, True, k_len - q_len, window)
        tensors = (query[:, :, q].double(), key[:, :, k].double(), value[:, :, k].double())
        right = reference.attention(AttentionCall(*tensors, structure, 128**-0.5)).out
        torch.testing.assert_close(out[:, q].double(), right, atol=2e-2, rtol=2e-2)


@since("5.19", "the engine logs what a step raises, and goes on")
def test_captured_steps_are_refused_with_the_way_out() -> None:
    found = model()
    with pytest.raises(ValueError, match="use_cuda_graph=False"), adaattn_hf.continuous_batching(found) as engine:
        together(found, [[5, 6, 7]], NEW, engine, **ENGINE, use_cuda_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize(
    "asked", [{}, {"per_head": replace(rules((0, 300), (0, 4)), until=1500)}], ids=["exact", "plan"]
)
def test_pages_are_read_in_a_graph(asked: Any, page: int, dtype: torch.dtype) -> None:
    """Also when lengths are other ones than those that it was captured with."""
    call = paged((2000, 1, 0, 513, 256, 1999), page, dim=128, dtype=dtype, device="cuda", **asked)
    atol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    right = truth(call)
    torch.testing.assert_close(attend(call).double(), right, atol=atol, rtol=0)
    structure: Any = call.structure
    again, graph = replace(call, structure=structure.with_changes()), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(again)
    for lengths in ((2000, 1, 0, 513, 256, 1999), (1998, 0, 0, 512, 255, 40)):
        structure.borders.copy_(torch.tensor((0, *lengths)).cumsum(0))
        right = truth(again)
        graph.replay()
        torch.testing.assert_close(out.double(), right, atol=atol, rtol=0)
