"""Checks that a plan belongs to an attention module, and resolves the module's part of it.

At its first call each module looks up its part of the plan and checks the hash of its weights, its dtype, its
configuration and the major version of Transformers. A plan that does not fit is refused with the reason. This module
needs torch only.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from adaattn_hf.attention.tap import listening
from adaattn_hf.config import settings_of
from adaattn_hf.plans.execute import no_gradient
from adaattn_hf.plans.plan import LayerPlan, Plan, PlanError
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.store import CONFIG_KEY, layer_tensors
from adaattn_hf.plans.tensors import LayerTensors

from .configured import refuse_other_configuration
from .hashes import model_hash, pretrained, weight_hash
from .layers import model_of, number_layers
from .parts import adapted, module_dtype, own_weights_train
from .replaced import watch
from .running import ADAPTED, TRAINED, Allowed, Trained, say, trains
from .weights import Weights

PROGRAM_SLOT = "_adaattn_program"
"""Attribute in which an attention module keeps a `Resolved` after resolving its plan."""
_CHECKED = "_adaattn_checked"
"""Attribute in which a model and its attention keep the plan that the model's weights were checked against."""
_ADAPTING = "_adaattn_adapting"
"""Attribute in which they keep the plan under which adapters alone are trained."""

_casts = torch._C._is_any_autocast_enabled


class Resolved(NamedTuple):
    """What became of a module's part of a plan.

    Attributes:
        raw: The settings that held the plan.
        program: The module's part, None if the module is exact.
        weights: The module's weights when they were checked.
        plan: What the settings held, which may be set anew in place.
        trained: Whether the model is trained under it, so that its weights change.
    """

    raw: Mapping[str, Any]
    program: Program | None
    weights: Weights
    plan: Any
    trained: bool

    @classmethod
    def of(cls, module: nn.Module, raw: Any, program: Program | None) -> Resolved:
        """What became of a module's part of the plan that its settings hold now."""
        plan = raw.get(CONFIG_KEY)
        return cls(raw, program, Weights.of(module), plan, isinstance(plan, Trained))


def resolved(slots: Mapping[str, Any], raw: Any, compiling: bool = False) -> Resolved | None:
    """Returns what became of a module's part of a plan, None if settings or weights have changed since."""
    known: Resolved | None = slots.get(PROGRAM_SLOT)
    if known is None or known.raw is not raw or known.raw.get(CONFIG_KEY) is not known.plan:
        return None
    return known if known.trained or compiling or known.program is None or known.weights.same() else None


def program_of(module: nn.Module, compiling: bool = False) -> Program | None:
    """Returns an attention module's part of the plan, `None` if it is exact; PlanError if it does not fit."""
    seats = None if compiling else listening().seats
    seat = None if seats is None else seats.get(module)
    raw = getattr(getattr(module, "config", None), "adaattn", None) if seat is None else seat.raw
    if raw is None:
        return None
    if seat is not None and module.training:
        # a checkpointed layer is computed again in the backward pass, in another thread or after the block
        raise PlanError(
            "use_plan: the model is in training mode, whose passes may be repeated behind the block; call "
            "model.eval(), or train with the plan that adaattn_hf.load_plan(model, directory) gives it"
        )
    slots = module.__dict__ if seat is None else seat.slots
    known = resolved(slots, raw, compiling)
    if known is None:
        if compiling:
            raise PlanError(
                "the plan was not read before compiling; call the model once, or adaattn_hf.load_plan(model), "
                "before torch.compile"
            )
        known = slots[PROGRAM_SLOT] = _settled(module, slots.get(PROGRAM_SLOT), raw)
    if module.training and not (known.trained or compiling) and trains(known.program):
        _train(module, known)
    if module.training and not compiling and known.program is not None and not known.program.has_gradient:
        _refuse_training(module, known.program)
    adapting = module.__dict__.get(_ADAPTING) is known.plan
    if _casts() and known.program is not None and not (module.training or known.trained or adapting):
        _refuse_autocast(known, known.program)
    return known.program


def _refuse_training(module: nn.Module, program: Program) -> None:
    """Refuses a program without a gradient before the first step of a training, in place of its backward pass."""
    whole = model_of(module) or module
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in whole.parameters()):
        raise PlanError(no_gradient(program))


def _refuse_autocast(known: Resolved, program: Program) -> None:
    """Refuses autocast to another dtype than a plan was verified in (PlanError); training has no verdict to lose."""
    device = known.weights.tensors[0].device.type
    for kind in ("cpu", "cuda") if device == "meta" else (device,):  # offloaded weights are moved for each pass
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind) and dtype != program.dtype:
            raise PlanError(
                f"autocast: the plan was calibrated in {program.dtype}, autocast computes in {dtype}; leave autocast, "
                f"or load the model with dtype=torch.{dtype} and calibrate it so"
            )


def _settled(module: nn.Module, before: Resolved | None, raw: Any) -> Resolved:
    """Resolves a module's part of the plan in its settings; PlanError if the plan does not belong to the model."""
    if not isinstance(raw, Mapping):
        settings_of(raw)  # an error: they are none
    data = raw.get(CONFIG_KEY)
    if before is not None and isinstance(data, Trained) and before.plan == data:
        program = before.program  # its weights may have changed since
    else:
        program = None if data is None else resolve(module, Plan.from_dict(data), raw)
    checked = data is None or isinstance(data, Trained) or module.__dict__.get(_CHECKED) is data
    if not checked and (model := model_of(module)) is not None:
        refuse_other_weights(model, data)
    return Resolved.of(module, raw, program)


def _train(module: nn.Module, known: Resolved) -> None:
    """Notes that a model is trained under its plan, which then is not saved any more; adapters alone leave it."""
    frozen = not any(weight.requires_grad for weight in known.weights.tensors)
    if not torch.is_grad_enabled() or (frozen and module.__dict__.get(_ADAPTING) is known.plan):
        return
    model = model_of(module)
    if frozen and model is not None and not own_weights_train(model):
        _mark(model, _ADAPTING, known.plan)
        return
    say(str(known.plan.get("weight_hash")), TRAINED)
    around = [module] if model is None else [part for part in model.modules() if module in part.modules()]
    configs: dict[int, Any] = {id(part.config): part.config for part in around if hasattr(part, "config")}
    seen: list[Any] = []
    for config in configs.values():
        settings = getattr(config, "adaattn", None)
        if not isinstance(settings, dict) or settings.get(CONFIG_KEY) != known.plan:
            continue
        if any(settings is other for other in seen):  # of another tower, which is saved apart
            settings = config.adaattn = dict(settings)
        settings[CONFIG_KEY] = Trained.under(config, known.plan)
        seen.append(settings)


def resolve(module: nn.Module, plan: Plan, raw: Mapping[str, Any]) -> Program | None:
    """Resolves and checks a module's part of the plan in settings, `None` if it is exact; PlanError for a misfit."""
    config: Any = module.config
    refuse_other_configuration(plan, config)
    check_versions(plan)
    index = getattr(module, "layer_idx", None)
    if index is None and (model := model_of(module)) is not None:
        number_layers(model)
        index = getattr(module, "layer_idx", None)
    layer, depth = plan.layer(index), getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int) and plan.layers and plan.layers[-1].layer >= depth:
        raise PlanError(f"the plan has a layer {plan.layers[-1].layer}, the model has {depth}; calibrate this model")
    if layer is None:
        return None
    if not isinstance(raw[CONFIG_KEY], Allowed):
        refuse_unproven(plan)
    if not isinstance(raw[CONFIG_KEY], Trained):
        _refuse_other_layer(module, plan, layer)
    source = getattr(config, "_name_or_path", None)
    found = layer_tensors(plan.tensors, layer.layer, source, raw) if plan.tensors else LayerTensors()
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(getattr(config, "hidden_size", None), int):
        head_dim = config.hidden_size // config.num_attention_heads
    for head, choice in enumerate(layer.choices):
        for part in choice.parts:
            wrong = part.misfit(found, head, len(layer.choices), head_dim)
            if wrong is not None:
                raise PlanError(f"plan of layer {layer.layer}: {wrong}; calibrate again")
    own = _own_heads(module, layer.layer, len(layer.choices), head_dim)
    return Program(layer, found, plan.max_length, own, plan.exact_steps, plan.dtype)


def refuse_unproven(plan: Plan) -> None:
    """Refuses a plan that held-out text has not shown good (PlanError: it was never verified, or failed)."""
    if plan.verified is None or not plan.verified.passed:
        why = "was never verified on held-out text" if plan.verified is None else "failed on held-out text"
        raise PlanError(
            f"the plan {why}, so it runs only if you allow it in this process: "
            "adaattn_hf.load_plan(model, unverified=True); or calibrate again, or remove it with "
            "adaattn_hf.remove_plan(model)"
        )


def _refuse_other_layer(module: nn.Module, plan: Plan, layer: LayerPlan) -> None:
    """Refuses a module of another dtype or with other weights than a layer of the plan (PlanError)."""
    dtype = module_dtype(module)
    if dtype != plan.dtype:
        raise PlanError(
            f"the plan was calibrated in {plan.dtype}, the model is loaded in {dtype}; load it with "
            f"dtype=torch.{plan.dtype}, or calibrate it in {dtype}"
        )
    if weight_hash(module) != layer.weights:
        raise PlanError(
            f"the weights of layer {layer.layer} are not those that the plan was calibrated on (fine-tuned, merged, "
            "another model); calibrate again, or remove it with adaattn_hf.remove_plan(model)"
        )


def _own_heads(module: nn.Module, index: int, kv_heads: int, head_dim: int | None) -> range:
    """Returns this process's key/value heads under tensor parallelism, else none; PlanError if heads are split."""
    split: list[Any] = [parameter for parameter in module.parameters() if hasattr(parameter, "device_mesh")]
    if not split:
        return range(0)
    for weight in split:
        mesh = weight.device_mesh
        whole = head_dim is not None and weight.shape[0] == kv_heads * head_dim and not kv_heads % mesh.size()
        if whole and mesh.ndim == 1 and weight.placements[0].is_shard(0):
            count = kv_heads // mesh.size()
            return range(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)
    raise PlanError(
        f"the weights of layer {index} are spread over {split[0].device_mesh.size()} devices (tensor parallelism), and "
        f"not by whole key/value heads, of which the plan names {kv_heads}; load the model without tp_plan, or remove "
        "the plan with adaattn_hf.remove_plan(model)"
    )


def refuse_other_weights(model: nn.Module, data: Mapping[str, Any]) -> None:
    """Refuses a model whose weights have another hash than a plan names, and watches it from then on (PlanError)."""
    model, weights = pretrained(model), str(data.get("weight_hash"))
    if model.__dict__.get(_CHECKED) is not data:
        if model_hash(model) != weights:
            raise PlanError(
                "the weights of the model are not those that the plan was calibrated on (fine-tuned, merged, another "
                "checkpoint); calibrate again, or remove it with adaattn_hf.remove_plan(model)"
            )
        _mark(model, _CHECKED, data)
    watch(model, weights, (PROGRAM_SLOT, _CHECKED, _ADAPTING))
    if adapted(model):
        say(weights, ADAPTED)


def _mark(model: nn.Module, name: str, data: Mapping[str, Any]) -> None:
    """Keeps a plan under a name in a model and its attention."""
    for part in model.modules():
        if part is model or "config" in part.__dict__:
            part.__dict__[name] = data


def check_versions(plan: Plan) -> None:
    """Refuses a plan of another major version of Transformers (PlanError: the major versions differ)."""
    here = importlib.metadata.version("transformers")
    if here.split(".")[0] != plan.transformers.split(".")[0]:
        raise PlanError(
            f"the plan was made with transformers {plan.transformers}, this is {here}: another major version may "
            "compute another function; calibrate again"
        )
