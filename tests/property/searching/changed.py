"""Models that change after a plan was made for them: a plan runs while the model computes what it was proven on."""

import copy
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from hypothesis import assume
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import adaattn_hf
from adaattn_hf.patches.plans.layers import attention_modules
from adaattn_hf.plans.choices import Choice, Precision, Window
from adaattn_hf.plans.plan import PlanError
from tests.support.calls import generator
from tests.support.families import models
from tests.support.models import InBuffers, tokens
from tests.support.plans import plan_for

WIDE = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 1}
"""A model whose matrices have more entries than anybody would look at one by one: 512 rows of 512."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": {}, "qwen3": {}, "mistral": {"sliding_window": 7}, "opt": {},
}  # fmt: skip
ADAPTED = {"gpt2": ["c_attn"]}
"""Layers that an adapter is put on, where they are not `q_proj` and `v_proj`."""
_LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"rope_parameters": _LINEAR}, {"rms_norm_eps": 0.1}, {"hidden_act": "gelu"}],
    "qwen3": [{"rope_parameters": _LINEAR}, {"rms_norm_eps": 0.1}],
    "mistral": [{"sliding_window": 2}, {"sliding_window": None}, {"rope_parameters": _LINEAR}],
    "gpt2": [{"layer_norm_epsilon": 0.1}, {"scale_attn_weights": False}, {"activation_function": "relu"}],
    "opt": [{"activation_function": "gelu"}, {"do_layer_norm_before": False}],
}
"""What a configuration is loaded with instead, by family."""
CHOICES = (Choice.of(Window(3)), Choice.of(Precision("bf16")), Choice.of(Window(4, 1), Precision("bf16")))
CHANGES = (
    "nothing", "columns", "columns", "buffers", "columns unseen", "columns elsewhere", "assigned", "adapter",
    "adapter merged", "settings", "settings", "dtype", "autocast",
)  # fmt: skip
MOVES = ("nothing", *["layers"] * 8, *["set later"] * 4)
"""Changes of the order and number of layers, and of what attention reads beside weights, behind the first call."""
LISTS: dict[str, Callable[[nn.ModuleList, int, int], Any]] = {
    "popped and inserted": lambda layers, a, b: layers.insert(b, layers.pop(a)),
    "exchanged by index": lambda layers, a, b: [*map(layers.__setitem__, (a, b), (layers[b], layers[a]))],
    "in a new list": lambda layers, a, b: nn.ModuleList([*layers][::-1]), "popped": lambda layers, a, b: layers.pop(a),
    "deleted": lambda layers, a, b: layers.__delitem__(a),
    "doubled in place": lambda layers, a, b: layers.__setitem__(a, layers[b]),
    "doubled by insert": lambda layers, a, b: layers.insert(a, layers[b]),
    "copied in place": lambda layers, a, b: layers.__setitem__(a, copy.deepcopy(layers[b])),
    "sliced": lambda layers, a, b: layers[min(a, b) + 1 :],
    "sorted inside": lambda layers, a, b: layers._modules.update({str(a): layers[b], str(b): layers[a]}),
}  # fmt: skip
"""What is done to a list of layers in two places; what is returned takes its place, if it is a list."""
IGNORED_KEYWORDS = ("nothing", "adapter")
ASKED_BY_LOAD = ("columns unseen", "settings", "dtype")
"""Changes that no forward pass sees: in the weights' data, or of a model that was loaded anew and is not bound yet."""


@dataclass
class Changed:
    """A model under a plan, and what is made of it."""

    family: str
    wide: bool
    choice: Choice  # what its plan says of every head
    change: str  # one of CHANGES or MOVES
    seed: int  # of places and numbers of the change
    loads: bool  # whether load_plan is asked after it, and not the next forward pass alone


@st.composite
def changed(draw: st.DrawFn, changes: tuple[str, ...] = CHANGES) -> Changed:
    family, change = draw(st.sampled_from(list(FAMILIES))), draw(st.sampled_from(changes))
    wide = family == "llama" and changes is CHANGES and draw(st.booleans())
    assume(change != "buffers" or family in ("llama", "qwen3", "mistral"))
    choice = draw(st.sampled_from(CHOICES))
    return Changed(family, wide, choice, change, draw(st.integers(0, 999)), draw(st.booleans()))


def fresh(call: Changed) -> Any:
    changes = FAMILIES[call.family] | (WIDE if call.wide else {})
    changes |= {"num_hidden_layers": 3} if call.change == "layers" else {}
    model = models(call.family, changes, tf.AutoModelForCausalLM).ours.requires_grad_(False)
    if call.change == "buffers":
        for _, module in attention_modules(model, model.config.model_type):
            module.o_proj = InBuffers(module.o_proj)
    return model


def pick(things: Any, source: torch.Generator) -> Any:
    return things[int(torch.randint(0, len(things), (), generator=source))]


def exact(model: Any) -> Tensor:
    """What a copy of a model computes under stock attention, which knows no plan."""
    twin = copy.deepcopy(model)
    (twin.get_base_model() if hasattr(twin, "get_base_model") else twin).set_attn_implementation("sdpa")
    for part in twin.modules():  # a layer that was copied has a configuration of its own
        if hasattr(part, "config"):
            part.config._attn_implementation = "sdpa"
    with torch.no_grad():
        return logits(twin)


def logits(model: Any) -> Tensor:
    out: Tensor = model(tokens(2, 11), use_cache=False).logits
    return out


def spoilt(weight: Tensor, source: torch.Generator) -> None:
    """Sets some columns to zero, most of them or a single one, or a single number to another one."""
    columns, kind = torch.arange(weight.shape[1]), pick(range(4), source)
    if kind < 2:
        weight[:, columns % 4 != 0 if kind == 0 else torch.rand(len(columns), generator=source) < 0.5] = 0.0
    elif kind == 2:
        weight[:, pick(columns, source)] = 0.0
    else:
        weight[pick(range(len(weight)), source), pick(columns, source)] += 1.0


def attention_weights(model: Any, source: torch.Generator) -> Any:
    """A matrix of a planned layer, or the buffer that stands for it."""
    module = pick([module for _, module in attention_modules(model, model.config.model_type)], source)
    return pick([t for t in (*module.parameters(), *module.buffers()) if t.dim() == 2], source)


def rearranged(model: Any, source: torch.Generator) -> None:
    """Layers of a model in another order, or another number of them."""
    parent, name, layers = next(
        (part, name, child) for part in model.base_model.modules() for name, child in part.named_children()
        if isinstance(child, nn.ModuleList)
    )  # fmt: skip
    a, b = torch.randperm(len(layers), generator=source)[:2].tolist()
    found = LISTS[pick(list(LISTS), source)](layers, a, b)
    if type(found) is nn.ModuleList:
        setattr(parent, name, found)


def set_later(model: Any, source: torch.Generator) -> None:
    """One of the numbers that attention reads beside weights."""
    names = ("scaling", "scale_attn_weights", "is_causal", "sliding_window", "inv_freq")
    every = itertools.product((model.config, *model.modules()), names)
    held = [(one, name) for one, name in every if getattr(one, name, None) is not None]
    held = [(one, name) for one, name in held if not (isinstance(one, nn.Module) and name == "sliding_window")]
    holder, name = pick(held, source)
    value = getattr(holder, name)
    if isinstance(value, Tensor):
        value.mul_(0.5)
    else:
        setattr(holder, name, not value if isinstance(value, bool) else 2 if isinstance(value, int) else value * 2)


def in_memory(call: Changed, model: Any, source: torch.Generator) -> Any:
    """The model after a change of its weights."""
    if call.change == "buffers":
        spoilt(next(part.packed for part in model.modules() if isinstance(part, InBuffers)), source)
    elif call.change == "columns":
        spoilt(attention_weights(model, source), source)
    elif call.change == "columns unseen":
        spoilt(attention_weights(model, source).data, source)
    elif call.change == "columns elsewhere":
        inner = {id(t) for _, m in attention_modules(model, model.config.model_type) for t in m.parameters()}
        others = [p for p in model.base_model.parameters() if p.dim() == 2 and id(p) not in inner]
        spoilt(pick(others, source), source)
    elif call.change == "layers":
        rearranged(model, source)
    elif call.change == "set later":
        set_later(model, source)
    elif call.change == "assigned":
        other = copy.deepcopy(model)
        spoilt(attention_weights(other, source), source)
        model.load_state_dict(other.state_dict(), assign=True)
    elif call.change.startswith("adapter"):
        wanted = LoraConfig(r=2, target_modules=ADAPTED.get(call.family, ["q_proj", "v_proj"]))
        model = get_peft_model(model, wanted)
        if call.change == "adapter merged":
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(0, 0.3, generator=source)
            model = model.merge_and_unload()
    return model.eval()


def reloaded(call: Changed, model: Any, source: torch.Generator) -> Any:
    """The model after a way through its directory, read with another setting or dtype."""
    override: dict[str, Any] = {"dtype": torch.bfloat16}
    if call.change == "settings":
        override = pick(SETTINGS[call.family], source)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(Path(directory))
        again = type(model).from_pretrained(directory, attn_implementation="adaattn", **override)
    return again.requires_grad_(False).eval()


def planned(call: Changed, model: Any) -> Tensor:
    """What the model computes under its plan; what left no trace for a forward pass is for `load_plan` to find."""
    if call.loads or call.change in ASKED_BY_LOAD:
        adaattn_hf.load_plan(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=call.change == "autocast"):
        return logits(model)


def judge(call: Changed) -> str:
    """`refused` where the model computes something else, `served` where it does not; any other end fails."""
    model, source = fresh(call), generator(call.seed)
    adaattn_hf.load_plan(model, plan_for(model, call.choice, layers=tuple(range(model.config.num_hidden_layers))))
    right, before = planned(replace(call, change="nothing"), model), exact(model)
    change: Callable[..., Any] = reloaded if call.change in ("settings", "dtype") else in_memory
    with torch.no_grad():
        model = change(call, model, source)
    with torch.autocast("cpu", torch.bfloat16, enabled=call.change == "autocast"):
        moved = float((exact(model).float() - before).abs().amax())
    try:
        found = planned(call, model)
    except PlanError as error:
        if call.change in IGNORED_KEYWORDS:
            raise AssertionError(f"refused, though nothing changed: {error}") from error
        return "refused"
    assert moved < 1e-6, f"served, though the model computes otherwise, by {moved:.2e}"
    away = float((found - right).abs().amax())
    assert away < 1e-5, f"served otherwise, off by {away:.2e}"
    return "served"
