"""Of two GPUs the second holds the tensors while the first is current, as `device_map` leaves it: nothing changes."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import adaattn_hf
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.stored import StoredKV, hadamard, quantise
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BACKENDS, refusals_of
from adaattn_hf.calibration.calibrate import decided
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.patches.checkpoint import placed
from adaattn_hf.patches.plans import attach

from ..support.calibration import open_inputs
from ..support.calls import attended
from ..support.choices import make_choice
from ..support.head_rules import rules
from ..support.letters import encode, lettered_llama, random_words
from ..support.plans import plan_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

SECOND = "cuda:1"
ROUNDING = 4e-2
"""Of outputs in bfloat16; a kernel that ran elsewhere errs by far more, or does not return."""
N = 700
WINDOWS = rules((0, 70), (0, 5))


@pytest.fixture(autouse=True)
def first_is_current() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


def draw(
    structure: MaskStructure, dim: int, per_head: HeadRules | None = None, heads: int = 8, grad: bool = False
) -> AttentionCall:
    query, key, value = (
        torch.randn(structure.batch, length, count, dim, device=SECOND, dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_(grad)
        for length, count in ((structure.q_len, heads), (structure.kv_len, 2), (structure.kv_len, 2))
    )
    return AttentionCall(query, key, value, structure, dim**-0.5, per_head=per_head)


def skip_if_refused(backend: str, asked: AttentionCall) -> None:
    if reasons := refusals_of(backend, asked.checked_kind(named=True)):
        pytest.skip("; ".join(reasons))


def whichever_is_current(run: Callable[[], Any], close: float = 0.0) -> Any:
    """What a run gives with the first device current, twice, which must be what it gives with the second."""
    found = [run(), run()]  # the second time by what the first launch left behind
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = run()
    for one in found:
        torch.testing.assert_close(one, expected, atol=close, rtol=close)
    return expected


def causal(n: int = N, q_len: int | None = None, batch: int = 2, **more: Any) -> MaskStructure:
    q_len = n if q_len is None else q_len
    return MaskStructure(batch, q_len, n, causal=True, q_offset=n - q_len, **more)


def left() -> Tensor:
    real = torch.ones(2, N, dtype=torch.bool, device=SECOND)
    real[0, :300] = False
    return real


CALLS: dict[str, Callable[[], AttentionCall]] = {
    "prefill": lambda: draw(causal(), 64), "prefill of large heads": lambda: draw(causal(), 128),
    "windows per head": lambda: draw(causal(), 64, WINDOWS),
    "windows of large heads": lambda: draw(causal(), 128, WINDOWS),
    "left padding": lambda: draw(causal(key_padding=left()), 64), "a step": lambda: draw(causal(q_len=1), 64),
    "a long step": lambda: draw(causal(9000, q_len=1, batch=1), 128),
    "a padded step": lambda: draw(causal(q_len=1, key_padding=left()), 64),
    "a step of windows": lambda: draw(causal(q_len=1), 64, WINDOWS),
}  # fmt: skip


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("native", "eager")])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, backend: str) -> None:
    asked = CALLS[name]()
    skip_if_refused(backend, asked)
    # kernels of others may share their work out otherwise each time
    out = whichever_is_current(lambda: attended(BACKENDS[backend], asked).out, 0.0 if backend == "triton" else ROUNDING)
    assert out.device == torch.device(SECOND)
    torch.testing.assert_close(out.double(), reference.attention(asked).out, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("per_head", [None, WINDOWS], ids=["exact", "windows per head"])
def test_a_heavy_call_by_the_kernel_for_hopper(per_head: HeadRules | None) -> None:
    from adaattn_hf.backends.triton.launch import device_facts

    from .test_specialised import served

    if not device_facts(torch.device(SECOND)).specialised:
        pytest.skip("needs a Hopper device and a Triton with Gluon")
    asked = draw(causal(4096, batch=1), 128, per_head, heads=16)
    out = whichever_is_current(lambda: served(asked, "specialised").out)
    torch.testing.assert_close(out.double(), reference.attention(asked).out, atol=ROUNDING, rtol=0)


@pytest.mark.usefixtures("bulk_always")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("per_head", [None, WINDOWS], ids=["exact", "windows per head"])
def test_a_launch_by_the_copy_engine(per_head: HeadRules | None, dim: int) -> None:
    asked = draw(causal(), dim, per_head)
    out = whichever_is_current(lambda: attended(BACKENDS["triton"], asked).out)
    torch.testing.assert_close(out.double(), reference.attention(asked).out, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_step_over_codes(bits: int) -> None:
    plain = draw(causal(q_len=1), 64)
    key = plain.key.float()
    mean = (key.mean(dim=2) @ hadamard(64, key.device)).contiguous()
    keys, key_scale = quantise(key, mean=mean)
    values, value_scale = quantise(plain.value.float(), bits=bits)
    record = StoredKV(key_scale, value_scale, mean, key[:, :, 0].contiguous())
    asked = AttentionCall(plain.query, keys, values, plain.structure, plain.scaling, stored=record)
    out = whichever_is_current(lambda: attended(BACKENDS["triton"], asked).out)
    torch.testing.assert_close(out.double(), reference.attention(asked.dequantised()).out, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("per_head", [None, WINDOWS], ids=["exact", "windows per head"])
@pytest.mark.parametrize("backend", ["triton", "fa4", "sdpa"])
def test_gradients(backend: str, per_head: HeadRules | None) -> None:
    """Of our own kernels also where autograd has no threads, which make their devices current."""
    asked = draw(causal(), 64, per_head, grad=True)
    skip_if_refused(backend, asked)
    leaves, weight = (asked.query, asked.key, asked.value), torch.randn(2, N, 8, 64, device=SECOND)

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad((attended(BACKENDS[backend], asked).out.float() * weight).sum(), leaves)

    threaded = whichever_is_current(run, 0.0 if backend == "triton" else ROUNDING)
    if backend == "triton":
        with torch.autograd.set_multithreading_enabled(False):
            torch.testing.assert_close(run(), threaded, atol=0.0, rtol=0.0)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact = reference.attention(AttentionCall(*wide, asked.structure, asked.scaling, per_head=per_head))
    for ours, true in zip(threaded, torch.autograd.grad((exact.out * weight).sum(), wide), strict=True):
        assert (ours.double() - true).norm() <= ROUNDING * true.norm()


def small() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval().bfloat16()
    model.set_attn_implementation("adaattn")
    plan = plan_for(model, make_choice("window", 32, 4), layers=(0, 1, 2, 3), lengths=(512,))
    attach.load_plan(model, plan)
    return model


def split(model: Any) -> Any:
    """A copy whose last two layers lie on the second device, as `device_map` places them."""
    accelerate = pytest.importorskip("accelerate")
    place: dict[str, int] = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    place |= {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    return accelerate.dispatch_model(copy.deepcopy(model), place, skip_keys="past_key_values")


def logits(model: Any, cache: Any, first: str, padded: bool) -> Tensor:
    ids = torch.randint(0, 64, (2, 203), generator=torch.Generator().manual_seed(0)).to(first)
    mask = torch.ones_like(ids)
    mask[0, : 90 * padded] = 0
    found = []
    with torch.no_grad():
        for start, stop in ((0, 200), (200, 201), (201, 202), (202, 203)):
            given = {"attention_mask": mask[:, :stop], "past_key_values": cache}
            found.append(model(ids[:, start:stop], use_cache=True, **given).logits)
    out = torch.cat(found, 1)
    return out[mask.bool().to(out.device)].float().cpu()


def near(ours: Tensor, theirs: Tensor) -> bool:
    """Equal, but for the rounding of a device of another kind."""
    return bool((ours - theirs).abs().max() <= 0.05 * theirs.std())


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left padding"])
@pytest.mark.parametrize("stored", [None, "int8"])
def test_a_model_on_two_devices(stored: str | None, padded: bool) -> None:
    model = small()
    both = split(model)

    def cache(one: Any) -> Any:
        return DynamicCache(config=one.config) if stored is None else adaattn_hf.AdaAttnCache(one, stored)

    found = [logits(both, cache(both), "cuda:0", padded) for _ in range(2)]
    assert torch.cuda.current_device() == 0
    whole = model.to(SECOND)
    with torch.cuda.device(1):
        expected = logits(whole, cache(whole), SECOND, padded)
    assert near(found[0], expected)
    assert near(found[1], expected)
    attach.remove_plan(whole)
    with torch.cuda.device(1):
        assert not near(logits(whole, cache(whole), SECOND, padded), expected), "the plan does nothing"


def test_training_a_model_on_two_devices() -> None:
    model = small()
    both, ids = split(model), torch.randint(0, 64, (2, 200))
    grads = []
    for one, first, current in ((both, "cuda:0", 0), (model.to(SECOND), SECOND, 1)):
        with torch.cuda.device(current):
            one(ids.to(first), use_cache=False).logits.float().square().mean().backward()
        layers = one.model.layers
        grads.append([layers[i].self_attn.q_proj.weight.grad.float().cpu() for i in range(4)])
    for ours, theirs in zip(*grads, strict=True):
        assert (ours - theirs).norm() <= 5e-2 * theirs.norm()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad")
def test_calibrating_a_model_on_two_devices(tmp_path: Path) -> None:
    """Layers are measured where they lie: risks are those of one device, and the plan passes."""
    pytest.importorskip("accelerate")
    text, found = random_words(tmp_path / "text.txt"), []
    settings = CalibrationSettings(
        budget=0.2, lengths=(192,), sequences=2, rows=48, labels=2, held_out=8, needles=2, haystacks=1,
        windows=(32, 64),
    )  # fmt: skip
    for device in ("auto", SECOND):
        model = placed(lettered_llama(layers=4), device)
        measurement = measure(open_inputs(model, encode, [text], settings))
        found.append((measurement.risks(), decided(measurement)))
        assert len({weight.device for weight in model.parameters()}) == 1 + (device == "auto")
    (both, plan), (one, _) = found
    np.testing.assert_allclose(both, one, rtol=1e-3, atol=1e-9)
    assert plan.met or "saves time" in plan.sentence


@pytest.mark.filterwarnings("ignore")  # torch warns of its own imports
def test_a_compiled_plan_on_the_second_device() -> None:
    """The plan is one node of the graph, behind which the kernels are those of an uncompiled call."""
    torch._dynamo.reset()
    model, ids = small().to(SECOND), torch.randint(0, 64, (2, 200), device=SECOND)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with torch.cuda.device(1):
            expected = model(ids, use_cache=False).logits.float()
        for _ in range(2):
            assert near(compiled(ids, use_cache=False).logits.float(), expected)


def test_a_capture_on_the_second_device() -> None:
    """A graph is captured and replayed where its tensors lie; the first device is current before and behind."""
    asked = draw(causal(), 64, WINDOWS)
    attend = partial(attended, "triton")
    attend(asked)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
            out = attend(asked).out
    for tensor in (asked.query, asked.key, asked.value):
        tensor.copy_(torch.randn_like(tensor))
    with torch.cuda.device(1):
        graph.replay()
    assert torch.equal(out, attend(asked).out)
