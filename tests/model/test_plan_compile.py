"""A compiled plan computes what the uncompiled one does, and a dense mask is read as the rules that made it."""

import copy
import gc
import itertools
import pickle
from typing import Any

import pytest
import torch
import transformers as tf

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.infer import infer_structure
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.patches.plans import attach
from adaattn_hf.patches.plans.slots import LAYER
from adaattn_hf.plans import store
from adaattn_hf.plans.bound_layer import BOUND_LAYERS
from adaattn_hf.plans.choices import Choice
from adaattn_hf.plans.plan import PlanError

from ..support.choices import make_choice
from ..support.plans import plan_for
from ..support.processor import ROUNDS_BF16
from ..support.versions import needs_tracing

pytestmark = needs_tracing

LENGTH = 200
CHOICES = [
    make_choice("window", 32, 4), make_choice(precision="int8"), make_choice(precision="bf16"),
    make_choice(rank=6), make_choice("window", 32, 4, rank=6, precision="int8"),
]  # fmt: skip
LLAMA: dict[str, Any] = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
)  # fmt: skip


def bases(heads: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    found = {
        f"layers.0.{name}.{head}": torch.randn(16, 6, generator=source) / 4
        for name in ("query_basis", "key_basis")
        for head in range(heads)
    }
    return found | {"layers.0.key_mean": torch.randn(heads, 16, generator=source)}


def planned(choice: Choice, family: str = "llama") -> Any:
    torch.manual_seed(0)
    heads = 2
    if family == "llama":
        model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
    elif family == "mistral":
        model = tf.MistralForCausalLM(tf.MistralConfig(**LLAMA, sliding_window=48))
    elif family == "llama4":
        more = dict(num_local_experts=2, intermediate_size_mlp=64, head_dim=16, attention_chunk_size=48)
        model = tf.Llama4ForCausalLM(tf.Llama4TextConfig(**LLAMA, **more))
    else:
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=512, initializer_range=0.3)
        )
    model.eval().set_attn_implementation("adaattn")
    name = store.remember_tensors(bases(heads)) if choice.columns else ""
    attach.load_plan(model, plan_for(model, choice, layers=(0,), lengths=(512,), tensors=name))
    return model


def tokens(batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_compiled_with_programs_of_its_own(copied: Any) -> None:
    model = planned(make_choice("window", 32, 4))
    expected = model(tokens()).logits
    twin = copied(model)
    handles = {layer.handle for m in model.modules() if (layer := m.__dict__.get(LAYER))}
    del model
    gc.collect()
    assert handles.isdisjoint(BOUND_LAYERS)
    torch.testing.assert_close(torch.compile(twin, backend="eager", fullgraph=True)(tokens()).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("padding", "choice"),
    [*(("left", choice) for choice in CHOICES), *itertools.product(("right", "packed"), CHOICES[::4])],
    ids=lambda one: getattr(one, "label", one),
)
def test_compiled_equals_uncompiled(padding: str, choice: Choice) -> None:
    model = planned(choice)
    ids = tokens(2)
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :130] = 0
    elif padding == "right":
        mask[1, 70:] = 0
    given: dict[str, Any] = {"attention_mask": mask}
    if padding == "packed":
        ids, mask = ids[:1], mask[:1]
        given = {"position_ids": torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])[None]}
    plain = model(ids, use_cache=False, **given).logits
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False, **given).logits
    real = mask.bool()
    torch.testing.assert_close(found[real], plain[real], atol=1e-5, rtol=1e-5)
    attach.remove_plan(model)
    moved = (model(ids, use_cache=False, **given).logits - plain)[real].abs().max() > 1e-3
    assert moved == (ROUNDS_BF16 or choice.label != "bf16"), "the plan does nothing"


@torch.no_grad()
@pytest.mark.parametrize("choice", CHOICES[2::2], ids=lambda choice: choice.label)
def test_at_a_fixed_length_compiled_equals_uncompiled_to_the_bit(choice: Choice) -> None:
    model, ids = planned(choice), tokens(2)
    plain = model(ids, use_cache=False).logits
    assert torch.equal(
        torch.compile(model, backend="eager", dynamic=False, fullgraph=True)(ids, use_cache=False).logits, plain
    )


@torch.no_grad()
@pytest.mark.parametrize(("family", "kept"), [("llama", "dynamic"), ("mistral", "static")])
def test_compiled_steps_in_a_cache_equal_uncompiled_ones(family: str, kept: str) -> None:
    """One row of a mask shows neither where a sequence began nor whether a window or padding hides its first keys."""
    model = planned(make_choice("window", 32, 4), family)
    ids = tokens(2, 101)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    logits = []
    for forward in (model, torch.compile(model, backend="eager", fullgraph=True)):
        cache = tf.StaticCache(config=model.config, max_cache_len=128) if kept == "static" else tf.DynamicCache()
        forward(ids[:, :100], past_key_values=cache, use_cache=True, attention_mask=mask[:, :100])
        step = forward(ids[:, 100:], past_key_values=cache, use_cache=True, attention_mask=mask)
        logits.append(step.logits)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    whole = model(ids, use_cache=False, attention_mask=mask).logits[:, -1:]
    torch.testing.assert_close(logits[1], whole, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_graph_does_not_outlive_its_plan() -> None:
    model, ids = planned(make_choice("window", 32, 4)), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled(ids, use_cache=False).logits
    attach.load_plan(model, attach.plan_of(planned(make_choice("window", 8, 2))))
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-3)
    attach.remove_plan(model)
    exact = model(ids, use_cache=False).logits
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, exact, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_compiled_plan_notices_other_weights() -> None:
    model, ids = planned(make_choice("window", 32, 4)), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(ids, use_cache=False)
    for edited in ("model.embed_tokens", "model.layers.0.self_attn.q_proj"):
        model.get_submodule(edited).weight.mul_(2)
        with pytest.raises(PlanError, match="calibrate again"):
            compiled(ids, use_cache=False)
        model.get_submodule(edited).weight.div_(2)
        compiled(ids, use_cache=False)


@torch.no_grad()
def test_chunks_are_refused_before_they_are_traced() -> None:
    model = planned(make_choice("window", 32, 4), "llama4")
    model(tokens(), use_cache=False)
    with pytest.raises(Exception, match="does not tell from a chunk's"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens(), use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_dense_mask_counts_sinks_from_the_sequence(family: str) -> None:
    model = planned(make_choice("window", 32, 4), family)
    ids = tokens()
    padded = torch.cat([torch.zeros(1, 130, dtype=ids.dtype), ids], 1)
    length = padded.shape[1]
    places = (torch.arange(length) - 130).clamp(min=0)[None]
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None].clone()
    mask[..., :130] = False
    alone = model(ids, use_cache=False).logits
    for given in (mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
        found = model(padded, attention_mask=given, position_ids=places, use_cache=False).logits
        torch.testing.assert_close(found[:, 130:], alone, atol=1e-4, rtol=1e-4)


def test_a_mask_without_rules_is_refused_where_a_plan_counts_keys() -> None:
    model = planned(make_choice("window", 32, 4))
    mask = torch.rand(1, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.5
    with torch.no_grad(), pytest.raises(ValueError, match=r"or the model's for images.* counts keys"):
        model(tokens(), attention_mask=mask | torch.eye(LENGTH, dtype=torch.bool), use_cache=False)


def test_a_compiled_plan_says_that_it_has_no_gradient() -> None:
    model = planned(make_choice("window", 32, 4))
    with pytest.raises(Exception, match="has no gradient"):
        torch.compile(model, backend="eager", fullgraph=True)(tokens(), use_cache=False)


def test_a_compiled_plan_does_not_show_its_weights() -> None:
    """Of a whole model Transformers breaks the graph there, and the weights are those of the uncompiled plan."""
    layer = planned(make_choice("window", 32, 4)).model.layers[0].self_attn
    query, key = torch.zeros(1, 4, LENGTH, 16), torch.zeros(1, 2, LENGTH, 16)

    attend = attention_function()

    def shown(query: torch.Tensor) -> Any:
        return attend(layer, query, key, key, None, scaling=0.25, output_attentions=True)[1]

    with torch.no_grad(), pytest.raises(Exception, match="output_attentions: got True in a traced graph"):
        torch.compile(shown, backend="eager", fullgraph=True)(query)


def test_a_plan_is_not_exported() -> None:
    model = planned(make_choice("window", 32, 4))
    with torch.no_grad(), pytest.raises(Exception, match="cannot be exported"):
        torch.export.export(model, (tokens(),), {"use_cache": False}, strict=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_plan_is_not_kept_in_a_graph_of_jit_trace() -> None:
    """Whose graph would count keys by the padding of its making."""
    model = planned(make_choice("window", 32, 4)).requires_grad_(False)

    def run(ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return out

    with pytest.raises(ValueError, match=r"plan of layer 0: .* cannot be exported; .*remove_plan"):
        torch.jit.trace(run, tokens(), check_trace=False)


STRUCTURES = {
    "causal": MaskStructure(2, 20, 20, causal=True),
    "step": MaskStructure(2, 1, 20, causal=True, q_offset=12),
    "left": MaskStructure(2, 20, 20, causal=True, key_padding=torch.arange(20)[None].expand(2, -1) > 4),
    "right": MaskStructure(2, 20, 20, causal=True, key_padding=torch.arange(20)[None].expand(2, -1) < 14),
    "encoder": MaskStructure(2, 20, 20, key_padding=torch.arange(20)[None].expand(2, -1) < 14),
    "window": MaskStructure(2, 20, 20, causal=True, window=6),
    "documents": MaskStructure(
        1, 20, 20, causal=True, q_segments=torch.arange(20)[None] // 7, k_segments=torch.arange(20)[None] // 7
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_rules_are_read_from_a_mask(name: str) -> None:
    structure = STRUCTURES[name]
    batch, q_len = structure.batch, structure.q_len
    visible = structure.visible().expand(batch, 1, q_len, 20)
    query, key = torch.zeros(batch, 2, q_len, 4), torch.zeros(batch, 2, 20, 4)
    dense = MaskStructure(batch, q_len, 20, mask=visible)
    read = infer_structure(AttentionCall(query, key, key, dense, 1.0))
    assert read is not None
    assert read.structure.mask is None
    assert torch.equal(read.structure.visible().expand_as(visible), visible)
    assert read.structure.causal == structure.causal
    bias = torch.where(visible, 0.0, float("-inf"))
    told = infer_structure(AttentionCall(query, key, key, MaskStructure(batch, q_len, 20), 1.0, bias=bias))
    assert told is not None
    assert told.bias is None
    slopes = infer_structure(AttentionCall(query, key, key, MaskStructure(batch, q_len, 20), 1.0, bias=bias + 0.5))
    assert slopes is not None
    assert slopes.bias is not None
