"""Checks that a plan belongs to an attention module, and resolves the module's part of it.

At its first call each module looks up its part of the plan and checks the hash of its weights, its dtype, its
configuration and the major version of Transformers, and does so again when the model's door noticed a change. A plan
that does not fit is refused with the reason. This module needs torch only.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from adaattn_hf.attention.listeners import seats
from adaattn_hf.attention.tracing import any_autocast
from adaattn_hf.config import settings_of
from adaattn_hf.plans.execute import no_gradient
from adaattn_hf.plans.limits import unproven
from adaattn_hf.plans.plan import LayerPlan, Plan, PlanError
from adaattn_hf.plans.program import Program
from adaattn_hf.plans.store import CONFIG_KEY, layer_tensors
from adaattn_hf.plans.tensors import LayerTensors

from .configured import refuse_other_configuration, refuse_other_settings
from .door import Door, Stamp, door_of, running
from .hashes import model_hash, weight_hash
from .layers import attention_modules, model_of, number_layers
from .parts import adapted, module_dtype, own_weights_train, parts, resident
from .running import ADAPTED, TRAINED, Allowed, Trained, say, trains
from .weights import Weights

PROGRAM_SLOT = "_adaattn_program"
"""Attribute in which an attention module keeps a `Resolved` after resolving its plan."""


class Resolved(NamedTuple):
    """What became of a module's part of a plan.

    Attributes:
        raw, plan: The settings that held the plan, and the plan, which may be set anew in place.
        program: The module's part, None if the module is exact.
        weights, stamp: The module when it was checked, and what stands for its model then, if it has one.
        trained: Whether the model is trained under it, so that its weights change.
        covered: Whether the door of the model compares the module's weights, which are there between passes.
    """

    raw: Mapping[str, Any]
    program: Program | None
    weights: Weights
    plan: Any
    trained: bool
    stamp: Stamp | None
    covered: bool

    @property
    def door(self) -> Door | None:
        """The door of the model, while that is there."""
        return None if self.stamp is None else self.stamp()

    @classmethod
    def of(cls, module: nn.Module, raw: Any, program: Program | None, door: Door | None) -> Resolved:
        """What became of a module's part of the plan that its settings hold now."""
        plan = raw.get(CONFIG_KEY)
        stamp = None if door is None or door.state is None else door.state.stamp
        covered = stamp is not None and all(resident(part.module) for part in parts(module))
        return cls(raw, program, Weights.of(module), plan, isinstance(plan, Trained), stamp, covered)


def resolved(slots: Mapping[str, Any], raw: Any, compiling: bool = False) -> Resolved | None:
    """Returns what became of a module's part of a plan, None if it is to be looked at: outside of a pass of its model,
    or where settings or weights have changed since.
    """
    known: Resolved | None = slots.get(PROGRAM_SLOT)
    if known is None or known.raw is not raw or known.raw.get(CONFIG_KEY) is not known.plan:
        return None
    if known.trained or compiling or known.program is None:
        return known
    covered = known.covered and known.stamp is not None
    return known if known.stamp is running()[0] and (covered or known.weights.same()) else None


def _alone(known: Resolved | None, raw: Any) -> Resolved | None:
    """The same for a layer that runs outside of a pass of its model: computed again for gradients, or by itself."""
    if known is None or known.door is None or known.raw is not raw or raw.get(CONFIG_KEY) is not known.plan:
        return None
    state = known.door.state
    unchanged = state is not None and known.stamp is state.stamp and state.same()
    return known if unchanged and known.weights.same() else None


def program_of(module: nn.Module, compiling: bool = False) -> Program | None:
    """Returns an attention module's part of the plan, `None` if it is exact; PlanError if it does not fit."""
    open_seats = None if compiling else seats()
    seat = None if open_seats is None else open_seats.get(module)
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
        before = slots.get(PROGRAM_SLOT)
        if before is not None and before.door is not None and not before.trained:
            before.door.refuse_foreign(module)
        known = slots[PROGRAM_SLOT] = _alone(before, raw) or _settled(module, before, raw)
    if module.training and not (known.trained or compiling) and trains(known.program):
        _train(module, known)
    if module.training and not compiling and known.program is not None and not known.program.has_gradient:
        _refuse_training(module, known.program)
    if any_autocast() and known.program is not None and not (module.training or known.trained or _adapts(known)):
        _refuse_autocast(known, known.program)
    return known.program


def _adapts(known: Resolved) -> bool:
    """Whether adapters alone were trained under the plan."""
    return known.door is not None and known.door.adapting is known.plan


def _refuse_training(module: nn.Module, program: Program) -> None:
    """Refuses a program without a gradient before the first step of a training, in place of its backward pass."""
    whole = model_of(module) or module
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in whole.parameters()):
        raise PlanError(no_gradient(program))


def _refuse_autocast(known: Resolved, program: Program) -> None:
    """Refuses autocast to another dtype than a plan was verified in (PlanError); training has no verdict to lose.

    Autocast leaves fp64 alone.
    """
    device = known.weights.tensors[0].device.type
    for kind in ("cpu", "cuda") if device == "meta" else (device,):  # offloaded weights are moved for each pass
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind) and program.dtype not in (dtype, "float64"):
            raise PlanError(
                f"autocast: the plan was calibrated in {program.dtype}, autocast computes in {dtype}; leave autocast, "
                f"or load the model with dtype=torch.{dtype} and calibrate it so"
            )


def _settled(module: nn.Module, before: Resolved | None, raw: Any) -> Resolved:
    if not isinstance(raw, Mapping):
        settings_of(raw)  # an error: they are none
    data, door = raw.get(CONFIG_KEY), None if before is None else before.door
    if before is not None and isinstance(data, Trained) and before.plan == data:
        program = before.program  # its weights may have changed since
    else:
        plan = None if data is None else Plan.from_dict(data)
        program = None if plan is None else resolve(module, plan, raw)
        if plan is not None and not isinstance(data, Trained):
            model = (door and door.trunk()) or model_of(module)
            door = None if model is None else refuse_other_weights(model, plan)
    return Resolved.of(module, raw, program, door)


def _train(module: nn.Module, known: Resolved) -> None:
    """Notes that a model is trained under its plan, which then is not saved any more; adapters alone leave it."""
    frozen = not any(weight.requires_grad for weight in known.weights.tensors)
    if not torch.is_grad_enabled() or (frozen and _adapts(known)):
        return
    model = model_of(module)
    if frozen and model is not None and not own_weights_train(model):
        door_of(model).adapting = known.plan
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
    if not isinstance(raw[CONFIG_KEY], Allowed):
        refuse_unproven(plan)
    layer, depth = plan.layer(index), getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int) and plan.layers and plan.layers[-1].layer >= depth:
        raise PlanError(f"the plan has a layer {plan.layers[-1].layer}, the model has {depth}; calibrate this model")
    if layer is None:
        return None
    if not isinstance(raw[CONFIG_KEY], Trained):
        _refuse_other_layer(module, plan, layer)
    heads, groups = getattr(config, "num_attention_heads", None), getattr(module, "num_key_value_groups", 1)
    if isinstance(heads, int) and isinstance(groups, int) and len(layer.choices) != heads // groups:
        raise PlanError(
            f"plan of layer {layer.layer}: made for {len(layer.choices)} key/value heads, the model has "
            f"{heads // groups}; give the plan of this model, or calibrate again"
        )
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
    """Refuses a plan or cache format that held-out text has not shown good (PlanError says why)."""
    reason = unproven(plan)
    if reason is not None:
        raise PlanError(
            f"the plan {reason}, so it runs only if you allow it in this process: "
            "adaattn_hf.load_plan(model, unverified=True); or calibrate again, or remove it with "
            "adaattn_hf.remove_plan(model)"
        )


def _refuse_other_layer(module: nn.Module, plan: Plan, layer: LayerPlan) -> None:
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


def refuse_other_weights(model: nn.Module, plan: Plan, *, anew: bool = False) -> Door:
    """Refuses a model that is not as a plan names it or as it was when one was first read (PlanError); its door.

    With `anew` its weights are read again though no counter says that they changed.
    """
    door = door_of(model)
    state = door.now()
    if anew or not state.hash:
        state.hash = model_hash(model)
    if state.hash != plan.weight_hash:
        door.state = None
        for index, module in attention_modules(door.trunk(), plan.model_type):
            if (layer := plan.layer(index)) is not None:
                _refuse_other_layer(module, plan, layer)
        raise PlanError(
            "the weights of the model are not those that the plan was calibrated on (fine-tuned, merged, layers moved, "
            "another checkpoint); calibrate again, or remove it with adaattn_hf.remove_plan(model)"
        )
    if anew or state is not door.last:  # once for all layers
        dict(attention_modules(door.trunk(), plan.model_type))  # refuses two of one number
        facts = door.facts()
        refuse_other_settings(door.first, facts)
        door.first, door.last = facts | door.first, state
    if adapted(model):
        say(plan.weight_hash, ADAPTED)
    else:
        door.adapting = None
    return door


def check_versions(plan: Plan) -> None:
    """Refuses a plan of another major version of Transformers (PlanError: the major versions differ)."""
    here = importlib.metadata.version("transformers")
    if here.split(".")[0] != plan.transformers.split(".")[0]:
        raise PlanError(
            f"the plan was made with transformers {plan.transformers}, this is {here}: another major version may "
            "compute another function; calibrate again"
        )
