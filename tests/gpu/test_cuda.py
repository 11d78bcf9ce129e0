"""The plug-in on a CUDA device: every backend that is installed there against the reference, and models end to end."""

import copy
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import StaticCache

import adaattn_hf
from adaattn_hf.attention import reference
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import HeadRules
from adaattn_hf.attention.stored import StoredKV, hadamard, quantise
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.select import BACKENDS, BackendRefusal, attend, choose, refusals_of
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.plans.choices import EXACT

from ..support.calls import attended
from ..support.choices import make_choice
from ..support.models import main_output
from ..support.on_device import shifted
from ..support.operators import NamedOperators
from ..support.plans import plan_for
from ..support.versions import since

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("bulk_always")]

LENGTH = 193


def structures() -> dict[str, MaskStructure]:
    """One of each kind, with lengths that fit no tile."""
    n = LENGTH
    left = torch.ones(3, n, dtype=torch.bool)
    left[0, :100] = False
    left[1, :1] = False
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 100, 1, n - 121]))[None]
    spans = torch.full((3, n), -1)
    spans[:, 30:60] = 0
    holes = torch.rand(3, n, generator=torch.Generator().manual_seed(1)) > 0.2
    made = {
        "full": MaskStructure(3, n, n),
        "cross": MaskStructure(3, 17, n),
        "causal": MaskStructure(3, n, n, causal=True),
        "suffix": MaskStructure(3, 40, n, causal=True, q_offset=n - 40),
        "static cache": MaskStructure(3, 40, n, causal=True, q_offset=60),
        "decode": MaskStructure(3, 1, n, causal=True, q_offset=n - 1),
        "long decode": MaskStructure(2, 1, 1000, causal=True, q_offset=999),
        "window": MaskStructure(3, n, n, causal=True, window=32),
        "window both ways": MaskStructure(3, n, n, window=32),
        "window and sinks": MaskStructure(3, n, n, causal=True, window=32, sinks=4),
        "left padding": MaskStructure(3, n, n, causal=True, key_padding=left),
        "right padding": MaskStructure(3, n, n, key_padding=left.flip(1)),
        "padded decode": MaskStructure(3, 1, n, causal=True, q_offset=n - 1, key_padding=left),
        "padded prefill behind a past": MaskStructure(3, 40, n, causal=True, q_offset=n - 40, key_padding=left),
        "holes": MaskStructure(3, n, n, causal=True, key_padding=holes),
        "documents": MaskStructure(1, n, n, causal=True, q_segments=documents, k_segments=documents),
        "chunks": MaskStructure(3, n, n, causal=True, chunk=50),
        "spans": MaskStructure(3, n, n, causal=True, spans=spans),
        "device offset": MaskStructure(3, 1, n, causal=True, q_offset=torch.tensor(99)),
    }
    return {name: _moved(s) for name, s in made.items()}


def _moved(structure: MaskStructure) -> MaskStructure:
    tensors = {k: v.cuda() for k, v in vars(structure).items() if isinstance(v, torch.Tensor)}
    return structure.with_changes(**tensors)


def make(structure: MaskStructure, dtype: torch.dtype, dim: int, **extra: Any) -> AttentionCall:
    g = torch.Generator("cuda").manual_seed(5)

    def draw(length: int, heads: int) -> torch.Tensor:
        shape = (structure.batch, length, heads, dim)
        return torch.randn(shape, generator=g, device="cuda").to(dtype).transpose(1, 2)

    q, k, v = draw(structure.q_len, 8), draw(structure.kv_len, 2), draw(structure.kv_len, 2)
    return AttentionCall(q, k, v, structure, scaling=dim**-0.5, **extra)


@pytest.mark.parametrize("dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", structures() if torch.cuda.is_available() else ["none"])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_backend_equals_reference(backend: str, name: str, dtype: torch.dtype, dim: int) -> None:
    call = make(structures()[name], dtype, dim)
    reasons = refusals_of(backend, call.checked_kind(named=True))
    if reasons:
        pytest.skip("; ".join(reasons))
    truth = reference.attention(call).out
    close(attended(BACKENDS[backend], call).out, call, truth)


def close(out: torch.Tensor, call: AttentionCall, truth: torch.Tensor) -> None:
    dtype = call.query.dtype
    assert out.dtype == dtype
    plain = attended(BACKENDS["eager"], call).out.double()
    # half precision: twice torch's own error in the same dtype and one rounding band; fp32 matmuls are exact to 1e-5
    bound = 1e-5 if dtype is torch.float32 else 2 * (plain - truth).abs().max().item()
    band = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps * truth.abs().max().item()
    assert (out.double() - truth).abs().max().item() <= bound + band


@pytest.mark.parametrize("kv_len", [1, 63, 4097])
def test_a_step_asks_for_no_plan_of_its_length(kv_len: int) -> None:
    call = make(MaskStructure(2, 1, kv_len, causal=True, q_offset=kv_len - 1), torch.bfloat16, 128)
    truth = reference.attention(call).out
    with NamedOperators() as noted:
        out = attended(BACKENDS["sdpa"], call).out
    assert not [name for name in noted.names if "cudnn" in name]
    close(out, call, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", structures() if torch.cuda.is_available() else ["none"])
def test_kernels_that_are_kept_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """Small calls by a mask, larger ones over packed runs."""
    call = make(structures()[name].simplified(), dtype, 64)
    for named in (False, True):
        kind = call.checked_kind(named)
        kernel = choose(kind).kernel(kind, call.per_head)
        for _ in range(2):
            close(kernel(call).out, call, reference.attention(call).out)


@pytest.mark.parametrize("name", structures() if torch.cuda.is_available() else ["none"])
def test_gradients_equal_reference(name: str) -> None:
    structure = structures()[name]
    call = make(structure, torch.float32, 64)
    leaves = [t.detach().clone().requires_grad_() for t in (call.query, call.key, call.value)]
    weight = torch.randn(structure.batch, structure.q_len, 8, 64, device="cuda")

    def gradients(compute: Any) -> list[torch.Tensor]:
        r = AttentionCall(*leaves, structure, scaling=call.scaling)
        return list(torch.autograd.grad((compute(r).to(weight.dtype) * weight).sum(), leaves))

    ours = gradients(lambda r: attend(r).out)
    true = gradients(lambda r: reference.attention(r).out)
    for a, b in zip(ours, true, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "name", ["left padding", "right padding", "documents", "chunks", "suffix", "padded prefill behind a past"]
)
def test_half_precision_gradients(name: str) -> None:
    """Within twice eager's error in the same dtype; most of these go to torch's flash kernel in one call."""
    structure = structures()[name]
    call = make(structure, torch.bfloat16, 64)
    leaves = [t.detach().clone().requires_grad_() for t in (call.query, call.key, call.value)]
    weight = torch.randn(structure.batch, structure.q_len, 8, 64, device="cuda", dtype=torch.float64)

    def gradients(compute: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
        r = AttentionCall(*tensors, structure, scaling=call.scaling)
        grads = torch.autograd.grad((compute(r).double() * weight).sum(), tensors)
        return [grad.double() for grad in grads]

    ours = gradients(lambda r: attended(BACKENDS["sdpa"], r).out, *leaves)
    eager = gradients(lambda r: attended(BACKENDS["eager"], r).out, *leaves)
    true = gradients(lambda r: reference.attention(r).out, *(t.detach().double().requires_grad_() for t in leaves))
    for a, e, b in zip(ours, eager, true, strict=True):
        assert (a - b).abs().max() <= 2 * (e - b).abs().max() + 2**-7 * b.abs().max()


KV: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, **SPECIAL}
BERT: dict[str, Any] = {k: v for k, v in KV.items() if k not in ("num_key_value_heads", *SPECIAL)}
MODELS: dict[str, Any] = {
    "llama": lambda: (tf.LlamaForCausalLM, tf.LlamaConfig(**KV)),
    "mistral": lambda: (tf.MistralForCausalLM, tf.MistralConfig(**KV, sliding_window=8)),
    "gpt2": lambda: (tf.GPT2LMHeadModel, tf.GPT2Config(**GPT2)),
    "bert": lambda: (tf.BertModel, tf.BertConfig(**BERT, pad_token_id=0)),
}


def pair(name: str) -> tuple[Any, Any]:
    cls, config = MODELS[name]()
    stock = cls._from_config(copy.deepcopy(config), attn_implementation="eager").eval().cuda()
    ours = cls._from_config(copy.deepcopy(config), attn_implementation="adaattn").eval().cuda()
    with torch.no_grad():
        for p in stock.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.1)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_eager(name: str, side: str) -> None:
    stock, ours = pair(name)
    ids = torch.randint(3, 64, (3, 50), device="cuda")
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, :20] = 0
        mask = mask if side == "left" else mask.flip(1)
    with torch.no_grad():
        a, b = main_output(stock(ids, attention_mask=mask)), main_output(ours(ids, attention_mask=mask))
    real = mask.bool()
    torch.testing.assert_close(b[real], a[real], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    "cache", ["dynamic", "static", pytest.param("offloaded", marks=since("5.20", "fetched before its copy is whole"))]
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_generates_the_same_tokens(name: str, cache: str) -> None:
    stock, ours = pair(name)
    ids = torch.randint(3, 64, (3, 12), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    args: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    if cache != "dynamic":
        args |= {"cache_implementation": cache, "disable_compile": True}
    assert torch.equal(stock.generate(ids, **args), ours.generate(ids, **args))


@pytest.mark.parametrize("stored", ["model", "int8"])
def test_an_offloaded_cache_waits_for_what_reads_it(stored: str) -> None:
    """A device that is behind with its attention: nothing is fetched into memory that is still read from."""
    _, model = pair("llama")
    ids = torch.randint(3, 64, (3, 60), device="cuda")

    def logits(cache: Any, behind: bool) -> torch.Tensor:
        update = cache.update

        def late(*args: Any, **kwargs: Any) -> Any:
            found = update(*args, **kwargs)
            torch.cuda._sleep(10_000_000)
            return found

        if behind:
            cache.update = late
        parts = ids.split([40, *[1] * 20], dim=1)
        with torch.no_grad():
            return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)

    ours = logits(adaattn_hf.AdaAttnCache(model, stored, offloading=True), behind=True)
    theirs = logits(adaattn_hf.AdaAttnCache(model, stored), behind=False)
    # the host rounds a prompt's keys where the other cache's device does: a code may differ by one
    assert float((ours - theirs).abs().max() / theirs.std()) < (1e-4 if stored == "model" else 0.05)


@pytest.mark.filterwarnings("ignore")  # torch warns of its own imports and of the empty graph it warms up with
@pytest.mark.parametrize("stored", ["static", "int8", "k8v4", "streaming"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_captured_step_gives_what_the_step_gives(name: str, stored: str) -> None:
    """A CUDA graph of one decoding step with a static cache: capturing fails wherever the host is asked."""
    torch._dynamo.reset()  # what other tests traced would make lengths symbols
    _, ours = pair(name)
    cache: Any = StaticCache(config=ours.config, max_cache_len=64)
    grows = None
    if stored == "streaming":  # a ring of 20 slots, which the prompt fills, beside a head that keeps everything
        made = plan_for(ours, make_choice("window", 16, 4))
        layers = [replace(layer, choices=(EXACT, *layer.choices[1:])) for layer in made.layers]
        load_plan(ours, replace(made, layers=tuple(layers)))
    if stored != "static":
        kept: dict[str, Any] = {"stored": "int8", "streaming": True} if stored == "streaming" else {"stored": stored}
        cache = adaattn_hf.AdaAttnCache(ours, **kept, max_cache_len=64)
        grows = adaattn_hf.AdaAttnCache(ours, **kept)
    # as many tokens as tell a growing cache the mean of its keys at once
    ids = torch.randint(3, 64, (2, 20), device="cuda")
    plain = ours.generate(
        ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids), past_key_values=grows
    )
    compiled = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        token = ours(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        found = [ids, token]
        for place in range(20, 25):
            positions = torch.full((2, 1), place, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            logits = compiled(token, past_key_values=cache, position_ids=positions).logits.clone()
            token = logits[:, -1:].argmax(-1)
            found.append(token)
    assert torch.equal(torch.cat(found, dim=1), plain)


FULL = """
import torch
from adaattn_hf.patches.cache.formats import FORMATS, store_tokens
from adaattn_hf.patches.cache.store import Room

x = torch.randn(2, 3, 1, 64, device="cuda")
store = FORMATS["int8"].store(x, x, Room(4, limit=4, fixed=True))
for place in range(5):
    store_tokens(x, x, *store.rooms.values(), None, None, store.count, None, None)
    torch.cuda.synchronize()
    print("held", int(store.count))
"""


def test_a_token_too_many_is_refused_on_the_device() -> None:
    """In a process of its own, as what a device refuses ends all that the process computes there."""
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["held", "1", "held", "2", "held", "3", "held", "4"], done.stderr
    assert done.returncode
    assert "the cache is full" in done.stderr


@pytest.mark.filterwarnings("ignore")
def test_capped_scores_of_a_compiled_model_err_no_more_than_stock() -> None:
    """Products in bfloat16 there, as those of stock eager attention."""
    torch._dynamo.reset()
    config = tf.Gemma2Config(**KV, head_dim=32, sliding_window=16)
    found = {}
    for name in ("eager", "adaattn"):
        torch.manual_seed(0)
        found[name] = tf.Gemma2ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).cuda().eval()
    ids = torch.randint(3, 64, (2, 60), device="cuda")
    with torch.no_grad():
        truth = found["eager"](ids, use_cache=False).logits
        errors = [
            (torch.compile(model.bfloat16())(ids, use_cache=False).logits.float() - truth).abs().max()
            for model in found.values()
        ]
    assert 0 < errors[1] <= 2 * errors[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("plan", [0, 50, 256], ids=["exact", "a plan for part of the way", "under a plan"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_as_transformers_compiles_it(name: str, plan: int, rows: int) -> None:
    """Twice over, so that captured graphs are replayed behind others; no step asks the host, no capture is given up."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    _, ours = pair(name)
    if plan:  # one head of a window beside an exact one, whose keys are shared out by a table
        made = plan_for(ours, make_choice("window", 12, 4), lengths=(plan,))
        layers = [replace(layer, choices=(layer.choices[0], EXACT)) for layer in made.layers]
        load_plan(ours, replace(made, layers=tuple(layers)), unverified=True)
    ids = torch.randint(3, 64, (rows, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, : 9 * (rows > 1)] = 0
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    expected = ours.generate(ids, **given)
    for _ in range(2):
        found = ours.generate(ids, **given, cache_implementation="static")
        assert torch.equal(found, expected)
    assert not counters["inductor"]["cudagraph_skips"]
    assert counters["stats"]["unique_graphs"] <= (1 if name == "llama" else 2)


@pytest.mark.filterwarnings("ignore")  # torch warns of its own imports and of the empty graph it warms up with
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_forward_pass_can_be_captured(side: str) -> None:
    """Without a compiler: `torch.cuda.graph` around the model, replayed over other tokens."""
    torch._dynamo.reset()
    _, ours = pair("llama")
    ids = torch.randint(3, 64, (2, 32), device="cuda")
    mask = None
    if side == "left":
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
    compiled = torch.compile(ours, backend="cudagraphs", fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(3, 64, (2, 32), device="cuda")
        with torch.no_grad():
            expected = ours(ids, attention_mask=mask, use_cache=False).logits
            actual = compiled(ids, attention_mask=mask, use_cache=False).logits
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(actual[real], expected[real], atol=2e-4, rtol=2e-4)


def test_half_precision_errs_no_more_than_stock() -> None:
    stock, ours = pair("llama")
    ids = torch.randint(3, 64, (3, 50), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    with torch.no_grad():
        truth = stock(ids, attention_mask=mask).logits.double()
        stock, ours = stock.bfloat16(), ours.bfloat16()
        errors = [(model(ids, attention_mask=mask).logits - truth)[mask.bool()].abs().max() for model in (stock, ours)]
    band = torch.finfo(torch.bfloat16).eps * truth.abs().max()
    assert errors[1] <= 2 * errors[0] + band
    # light padded rows: no flash-attn is first there, whether it is installed or not
    assert {choice.backend for choice in adaattn_hf.explain(ours).layers} <= {"sdpa", "triton"}


@pytest.mark.skipif(
    bool(BACKENDS["fa2"].missing()), reason="flash-attn 2 is not installed: its name is refused at load"
)
def test_a_forced_backend_refuses_fp32() -> None:
    _, ours = pair("llama")
    ours.set_attn_implementation("adaattn_fa2")
    with pytest.raises(BackendRefusal, match="float16 or bfloat16"):
        ours(torch.ones(1, 4, dtype=torch.long, device="cuda"))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adjoin", [False, True])
@pytest.mark.parametrize("name", ["decode", "long decode", "padded decode", "device offset"])
def test_a_step_reads_the_codes_of_a_cache(name: str, adjoin: bool, dtype: torch.dtype, bits: int, dim: int) -> None:
    """Rows of codes adjoin in a cache's own tensors, and do not where a layer laid them out."""
    call = make(structures()[name], dtype, dim)
    key, value = call.key.float(), call.value.float()
    mean = (key.mean(dim=2) @ hadamard(dim, key.device)).contiguous()
    keys, key_scale = quantise(key, mean=mean)
    values, value_scale = quantise(value, bits=bits)
    if adjoin:
        keys, values = keys.contiguous(), values.contiguous()
    record = StoredKV(key_scale, value_scale, mean, key[:, :, 0].contiguous())
    asked = AttentionCall(call.query, keys, values, call.structure, call.scaling, stored=record)
    backend = choose(asked.checked_kind())
    assert backend.name == "triton"
    truth = reference.attention(asked.dequantised()).out
    atol = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    for _ in range(2):  # the second finds the counters as the first left them
        torch.testing.assert_close(attended(backend, asked).out.double(), truth, atol=atol, rtol=0)


@pytest.mark.parametrize("q_len", [1, 300])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("windows", [None, (0, 70), (128, 30)], ids=str)
def test_variants_of_a_kernel_are_launched_again_with_what_they_were_compiled_for(
    windows: tuple[int, int] | None, softcap: float | None, q_len: int
) -> None:
    """Lengths, addresses and tables of other alignment take turns; each time the answer is the definition's."""
    rule = None if windows is None else HeadRules(windows, (5, 5), ("model",) * 2)
    for n in (700, 701, 700, 900, 704):
        structure = MaskStructure(2, q_len, n, causal=True, q_offset=n - q_len)
        asked = make(structure, torch.bfloat16, 64, per_head=rule, softcap=softcap)
        truth = reference.attention(asked).out
        for moved in ((), ("key",), (), ("query", "value")):
            tensors = {name: getattr(asked, name) for name in ("query", "key", "value")}
            tensors |= {name: shifted(tensors[name]) for name in moved}
            out = attended(BACKENDS["triton"], replace(asked, **tensors)).out
            torch.testing.assert_close(out.double(), truth, atol=2e-2, rtol=0)


@pytest.mark.parametrize("windows", [None, (0, 70), (128, 30)], ids=str)
def test_a_launch_is_launched_again_by_addresses(windows: tuple[int, int] | None) -> None:
    """Of one structure, as of the layers of a pass, over tensors that begin elsewhere and lie otherwise."""
    rule = None if windows is None else HeadRules(windows, (5, 5), ("model",) * 2)
    structure = MaskStructure(2, 704, 704, causal=True)
    asked = make(structure, torch.bfloat16, 64, per_head=rule)
    for _ in range(4):
        asked = make(structure, torch.bfloat16, 64, per_head=rule)
        tensors = asked.query, asked.key, asked.value
        truth = reference.attention(asked).out
        for one in (tensors, [t.contiguous() for t in tensors], [shifted(t) for t in tensors]):
            moved = dict(zip(("query", "key", "value"), one, strict=True))
            out = attend(replace(asked, **moved), "triton").out
            torch.testing.assert_close(out.double(), truth, atol=2e-2, rtol=0)
    with pytest.raises(ValueError, match="expected one device"):
        attend(replace(asked, key=asked.key.cpu()), "triton")


def test_a_launch_is_captured_and_replayed() -> None:
    """The graph holds addresses; what lies there may change."""
    rule = HeadRules((0, 70), (5, 5), ("model",) * 2)
    structure = MaskStructure(2, 704, 704, causal=True)
    asked = make(structure, torch.bfloat16, 64, per_head=rule)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            attend(asked, "triton")
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(asked, "triton").out
    for tensor in (asked.query, asked.key, asked.value):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.testing.assert_close(out.double(), reference.attention(asked).out, atol=2e-2, rtol=0)
