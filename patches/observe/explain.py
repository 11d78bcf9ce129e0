"""Explains which backend each layer of a model runs, why not the others, and what its plan changes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from adaattn_hf.attention.call import AttentionCall, empty_output
from adaattn_hf.attention.kind import COMPILING, DROPOUT, CallKind
from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.backends.select import BACKENDS, BackendRefusal, choose, order, refusals_of
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.wording import legend

from ..cache.caches import AdaAttnCache
from ..cache.memory import CacheMemory, memory_of
from ..cache.streaming import spans_of
from ..models.cache_keyword import cache_in, cache_keyword, with_cache
from ..models.support import Holder, check, model_in, refuse_other_attention, runs_ours, towers_of, unloaded
from ..plans.attach import plan_in, plan_of
from ..plans.slots import LAYER

_LENGTH = 8
_FOREIGN = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a model's own code may raise where it looks into tensors without data."""


@dataclass(frozen=True)
class LayerChoice:
    """The backend of one layer in one phase.

    Attributes:
        layer: Name of the attention module in the model.
        phase: `prefill`, `padded` (a batch with padding), `decode`, on CUDA `compiled`: a decode step with a static
            cache, which generation compiles, or of a model in training mode with attention dropout `training`.
        kind: The facts of the call.
        backend: Name of the backend that serves it.
        refused: Per other backend, all reasons why it cannot serve the call; empty for one that could, but comes later
            in the order.
        plan: The choices of the layer's key/value heads in words; empty if the layer is exact. Heads with a choice may
            run on another backend than exact heads.
    """

    layer: str
    phase: str
    kind: CallKind
    backend: str
    refused: dict[str, tuple[str, ...]]
    plan: str = ""


@dataclass(frozen=True)
class Explanation:
    """The backends of a model's layers, by phase."""

    model: str
    implementation: str
    layers: tuple[LayerChoice, ...]
    cache: CacheMemory | None = None
    """Memory of the model's key/value cache, None for a model without one."""
    legend: str = ""
    """What the labels of the plan's choices mean, empty without a plan."""
    verbose: bool = False
    """Whether its text names every reason of every backend; else those of another device are one line."""
    unknown: tuple[str, ...] = ()
    """Phases that could not be found out, in a sentence each."""

    def __str__(self) -> str:
        """One line per group of layers with equal backend, call and plan; then the refusals not listed before."""
        lines = [f"{self.model}, attn_implementation={self.implementation!r}"]
        groups: dict[tuple[str, str, CallKind, str], list[LayerChoice]] = {}
        plan_of_layer: dict[str, str] = {}
        for choice in self.layers:
            plan = "as above" if choice.plan and plan_of_layer.get(choice.layer) == choice.plan else choice.plan
            groups.setdefault((choice.phase, choice.backend, choice.kind, plan), []).append(choice)
            plan_of_layer[choice.layer] = choice.plan
        indent = " " * 11
        elsewhere: dict[str, dict[str, None]] = {}
        blocks: list[tuple[dict[str, tuple[str, ...]], list[str]]] = []
        for (phase, backend, kind, plan), layers in groups.items():
            first, last, refusals = layers[0].layer, layers[-1], dict[str, tuple[str, ...]]()
            for name, reasons in last.refused.items():
                device_type = BACKENDS[name].supports.device
                if self.verbose or device_type in ("", kind.device.type):
                    refusals[name] = reasons
                else:
                    elsewhere.setdefault(device_type, {})[name] = None
            span = first if len(layers) == 1 else f"{first} … {last.layer} ({len(layers)} layers)"
            block = [f"  {phase:8} {span}: {backend}  [{kind.words()}]"]
            if kind.features & DROPOUT and kind.device.type == "cpu":
                block.append(f"{indent}dropout in attention keeps the whole score matrix on a CPU")
            blocks.append((refusals, block + [f"{indent}plan: {plan}"] * bool(plan)))
        listed: dict[str, tuple[str, ...]] = {}
        for refusals, alike in groupby(blocks, itemgetter(0)):
            lines += [line for _, block in alike for line in block]
            if able := [name for name, reasons in refusals.items() if not reasons]:
                lines.append(f"{indent}would serve, too: {', '.join(able)}")
            repeated = [name for name, reasons in refusals.items() if reasons and listed.get(name) == reasons]
            if repeated:
                lines.append(f"{indent}not {', '.join(repeated)}: for the reasons above")
            named = {name: reasons for name, reasons in refusals.items() if reasons and name not in repeated}
            lines += [f"{indent}not {name}: {'; '.join(reasons)}" for name, reasons in named.items()]
            listed |= refusals
        for device_type, names in elsewhere.items():
            absent = ", no GPU here" if device_type == "cuda" and not torch.cuda.is_available() else ""
            lines.append(f"{indent}{device_type.upper()} only{absent}: {', '.join(names)}")
        if self.cache is not None and self.cache.layers:
            lines.append(f"  cache    {self.cache}")
        lines += [f"  unknown  {sentence}" for sentence in self.unknown]
        if not self.layers:
            lines.append("  no attention layer of this model called the attention interface")
        if any(choice.plan for choice in self.layers):
            lines.append(f"  labels   {self.legend}")
        return "\n".join(lines)


def explain(
    model: Holder | str | Path,
    *,
    inputs: Mapping[str, torch.Tensor] | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    cache: str = "model",
    streaming: bool = False,
    plan: Plan | str | Path | None = None,
    verbose: bool = False,
) -> Explanation:
    """Reports which backend and plan each attention layer of a model uses, by running a copy on the meta device.

    What needs data beside attention, such as routed experts, is passed over; of a model that cannot run so, its parts
    are explained, and what is not found out is said.

    Args:
        model: A model whose attention implementation is `adaattn…`, or what holds such models (a pipeline, PEFT,
            sentence-transformers). Of a directory or Hub id the configuration is read, and `adaattn` explained.
        inputs: Keyword arguments of the model's forward, for models that read neither token ids nor pixels.
        device: Explain for this device type (`cpu`, `cuda`) instead of the model's own.
        dtype: Explain for this dtype instead of the model's own.
        cache: Explain for a cache of this format; see `AdaAttnCache`.
        streaming: Count the cache's bytes with the streaming heads of the plan; see `AdaAttnCache`.
        plan: Explain with this plan (see `Plan.from_pretrained`) instead of the model's own.
        verbose: Let the text of the explanation name every reason of every backend, also of those for another device.

    Raises:
        ValueError: The model runs another attention implementation, its inputs cannot be guessed, it cannot use such a
            cache, no plan can be read there, or nothing could be found out.
        UnsupportedModel: The model computes attention itself, and nothing could be found out.
        TypeError: There is no model in it.
        OSError: No configuration can be read there.
        BackendRefusal: A forced backend cannot serve a layer.
    """
    root = unloaded(model) if isinstance(model, (str, Path)) else model_in(model)
    refuse_other_attention(root)
    towers = [(name, tower) for name, tower in towers_of(root) if runs_ours(tower)]
    if not towers:
        raise ValueError(
            f"model: got {type(root).__name__}, which holds no Transformers model that can be built from its "
            "configuration; pass the model that it was made of"
        )
    if plan is not None:
        plans: list[Plan | None] = [Plan.from_pretrained(plan)] * len(towers)
    else:
        plans = [(plan_in if isinstance(model, (str, Path)) else plan_of)(tower) for _, tower in towers]
    queue = [(*tower, tower_plan) for tower, tower_plan in zip(towers, plans, strict=True)]
    layers: list[LayerChoice] = []
    memories: list[CacheMemory] = []
    unknown: list[str] = []
    default = "cuda" if torch.cuda.is_available() else "cpu"
    while queue:
        name, tower, tower_plan = queue.pop(0)
        where = device or (tower.device.type if tower.device.type != "meta" else default)
        choices, memory, gaps = _explained(
            name, tower, tower_plan, dtype or tower.dtype, inputs, where, cache, streaming
        )
        memories += [] if memory is None else [memory]
        children = [(f"{name}.{child}".strip("."), module) for child, module in tower.named_children()]
        parts = [part for place, module in children for part in towers_of(module, place) if runs_ours(part[1])]
        if gaps and not choices and inputs is None and parts:
            queue[:0] = [(*part, tower_plan) for part in parts]
        else:
            layers, unknown = layers + choices, unknown + gaps
    if unknown and not layers:
        check(root)
        raise ValueError(unknown[0])
    used = [choice for each in plans if each is not None for layer in each.layers for choice in layer.choices]
    classes = ", ".join(type(tower).__name__ for _, tower in towers)
    names = ", ".join(dict.fromkeys(str(tower.config._attn_implementation) for _, tower in towers))
    memory = memories[0] if memories else None
    return Explanation(classes, names, tuple(layers), memory, legend(used), verbose, tuple(unknown))


def _or_input(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the output of a part beside attention, or its first input, of the same shape, where it needs data."""
    try:
        return forward(*args, **kwargs)
    except _FOREIGN:
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        if tensor is None:
            raise
        return tensor


Call = tuple[str, nn.Module, CallKind, str | None]  # name and module, facts of the call, the backend that is forced


class _DryRun(TorchFunctionMode):
    """A copy of a model on the meta device, whose calls are noted and answered by tensors of the right shape."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        with torch.device("meta"):
            copied: Any = type(model)(copy.deepcopy(model.config))
        self.device, self.unknown = torch.device(device), list[str]()
        self.model = copied.to(dtype=dtype).eval()
        self.names = {module: name for name, module in copied.named_modules()}
        self.calls: list[Call] = []
        for part in self.names:
            vars(part)[LAYER] = None  # a plan is not missing here
            if isinstance(part, PreTrainedModel):  # its warning would read the tokens, which are none of the user's
                vars(part)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
                part.config.output_attentions = False
            if not any("Attention" in type(inner).__name__ for inner in part.modules()):
                vars(part)["forward"] = partial(_or_input, part.forward)

    def answer(self, module: nn.Module, call: AttentionCall) -> torch.Tensor:
        """Notes a call as one of the device that is asked about, and answers by an uninitialised tensor."""
        kind = call.checked_kind()._replace(device=self.device)
        self.calls.append((self.names.get(module, type(module).__name__), module, kind, call.backend))
        return empty_output(call.query, call.key, call.value)

    def run(self, phase: str, **keywords: Any) -> tuple[Any, list[Call]]:
        """Runs the copy: its output, None where it needs data, which `unknown` then says, and its calls."""
        self.calls, out = [], None
        try:
            with torch.set_grad_enabled(self.model.training), listening(Listener(answer=self.answer)), self:
                out = self.model(**keywords)
        except BackendRefusal:
            raise
        except _FOREIGN as error:
            self.unknown.append(_unknown(phase, self.model, error))
        return out, self.calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers no where a model asks whether all of a mask is true, say, which only data could tell."""
        no = func is torch.Tensor.__bool__ and args[0].is_meta
        return False if no else func(*args, **(kwargs or {}))


def _unknown(phase: str, model: nn.Module, error: Exception) -> str:
    why = str(error).strip().partition("\n")[0]
    return f"{phase}: {type(model).__name__} cannot run without data: {why:.240}"


def _explained(
    path: str,
    model: PreTrainedModel,
    plan: Plan | None,
    dtype: torch.dtype,
    inputs: Mapping[str, Any] | None,
    device: str,
    stored: str,
    streaming: bool,
) -> tuple[list[LayerChoice], CacheMemory | None, list[str]]:
    """Returns what the layers of a model run, the memory of its cache, and phases that it cannot run without data.

    Of a prompt, of a padded batch and, for models with a cache, of one decode step. On CUDA the step follows once more,
    as generation with a static cache compiles it. Models that are trained with attention dropout begin with a step of
    training.
    """
    choices: dict[tuple[str, str, CallKind], LayerChoice] = {}
    labels: dict[int, str] = {}
    for layer in () if plan is None else plan.layers:
        heads: dict[str, list[str]] = {}
        for head, choice in enumerate(() if layer.is_exact else layer.choices):
            heads.setdefault(choice.label, []).append(str(head))
        labels[layer.layer] = "; ".join(
            f"{label} on key/value head{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            for label, numbers in heads.items()
        )
    spans = spans_of(model, plan) if streaming else None

    def add(phase: str, calls: list[Call]) -> None:
        exact = plan is not None and plan.exact_steps and phase in ("decode", "compiled")
        for name, module, kind, forced in calls:
            key = (f"{path}.{name}".strip("."), phase, kind)
            if key not in choices:
                backend, index = choose(kind, forced).name, getattr(module, "layer_idx", None)
                refused = {name: refusals_of(name, kind) for name in (*order(kind), *BACKENDS) if name != backend}
                of_plan = labels.get(index, "") if isinstance(index, int) and not exact else ""
                choices[key] = LayerChoice(*key, backend, refused, of_plan)

    try:
        dry = _DryRun(model, dtype, device)
        inputs = _inputs(dry.model) if inputs is None else {name: value.to("meta") for name, value in inputs.items()}
    except _FOREIGN as error:
        return [], None, [_unknown("inputs", model, error)]
    if model.training:
        dry.model.train()
        _, calls = dry.run("training", **inputs)
        if any(kind.features & DROPOUT for _, _, kind, _ in calls):
            add("training", calls)
        dry.model.eval()
    takes_cache = cache_keyword(inspect.signature(type(model).forward)) is not None
    uses_cache = takes_cache and model.can_generate() and not model.config.is_encoder_decoder
    # with a cache Transformers does not look for packed documents, which would need data
    keywords: dict[str, Any] = {"use_cache": True} if uses_cache else {}
    if stored != "model":
        keywords |= with_cache(dry.model, AdaAttnCache(dry.model, stored))
    out, calls = dry.run("prefill", **inputs, **keywords)
    add("prefill", calls)
    if out is not None and "input_ids" in inputs:
        add("padded", dry.run("padded", **inputs, attention_mask=torch.ones_like(inputs["input_ids"]))[1])
    filled = None if out is None or not uses_cache else cache_in(out)
    if filled is None:
        return list(choices.values()), None, dry.unknown
    memory = memory_of(filled, stored, spans) if isinstance(filled, Cache) else None
    step = {"input_ids": inputs["input_ids"][:, :1], "use_cache": True, **with_cache(dry.model, filled)}
    _, calls = dry.run("decode", **step)
    add("decode", calls)
    if device == "cuda":
        compiled = []
        for name, module, kind, forced in calls:
            # where the tokens end lies on the device, and a traced graph knows no lengths
            shape = "ragged" if kind.shape == "suffix" else kind.shape
            kind = kind._replace(shape=shape, features=kind.features | COMPILING, keys=0, kv_bytes=0, pairs=0)
            if kind.stored is None and (forced is None or not refusals_of(forced, kind)):
                compiled.append((name, module, kind, forced))
        add("compiled", compiled)
    return list(choices.values()), memory, dry.unknown


def _inputs(ghost: PreTrainedModel) -> dict[str, Any]:
    config = ghost.config
    if ghost.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros((1, channels, height, width), dtype=ghost.dtype, device="meta")}
    if ghost.main_input_name != "input_ids":
        raise ValueError(
            f"it reads {ghost.main_input_name!r}, which cannot be guessed; pass explain(model, inputs={{...}}) with "
            "the keywords of its forward"
        )
    ids = torch.zeros((1, _LENGTH), dtype=torch.long, device="meta")
    return {"input_ids": ids, "decoder_input_ids": ids} if config.is_encoder_decoder else {"input_ids": ids}
