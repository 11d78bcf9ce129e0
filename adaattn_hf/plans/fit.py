"""Checks that a plan belongs to an attention module, and resolves the module's part of it.

At its first call each module looks up its part of the plan and checks the hash of its weights, its dtype, its model
type and the major version of Transformers. A plan that does not fit is refused with the reason. This module needs
torch only; a callback finds the plan's calibrated tensors.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..attention.tap import listening
from .plan import LayerPlan, Plan, PlanError
from .program import Program
from .tensors import LayerTensors
from .trained import say_unproven, trains
from .weights import Weights

CONFIG_KEY = "plan"
"""Key of the plan in a configuration's settings."""
PROGRAM_SLOT = "_adaattn_program"
"""Attribute in which an attention module keeps a `Resolved` after resolving its plan."""
OWN_NUMBERS = "layers_by_weights"
"""Key in the protocol of plans for models without layer indices; such plans hold all layers, exact ones too."""
UNVERIFIED = "unverified"
"""Key in the settings that allows a plan to run without having passed verification on held-out text."""
_SAMPLES = 65536
_WHOLE = "model:"
"""Prefix of hashes over all weights of a model, not just those of attention."""
_CHECKED = "_adaattn_checked"
"""Attribute in which a model keeps the plan that its weights were checked against."""

TensorsOf = Callable[[Plan, int, "str | None", Any], LayerTensors]
"""Maps a plan, the index of a layer, where the model came from and its settings to the layer's calibrated tensors."""


def weight_hash(module: nn.Module) -> str:
    """Returns a hash of a module's own weights: name, shape, dtype and up to 65,536 spread entries of each."""
    digest = hashlib.sha256()
    for name, parameter in sorted(_state(module).items()):
        digest.update(f"{name} ".encode())
        digest.update(_sampled(_present(module, name, parameter)))
    return digest.hexdigest()


def _present(module: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight, or what accelerate's hook brings in its place for the pass where it was offloaded."""
    if not weight.is_meta:
        return weight
    owner, _, own_name = name.rpartition(".")
    kept = getattr(getattr(module.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    if kept is None:
        raise PlanError(
            f"{type(module).__name__}.{name} has no data (device 'meta'), expected the weights that the plan was "
            "made for; load them, then the plan"
        )
    brought: torch.Tensor = kept[own_name]
    return brought


def _state(module: nn.Module) -> Mapping[str, torch.Tensor]:
    """Returns a module's weights by name, bypassing hooks by which FSDP frees gathered weights in mid-forward."""
    if not any(part._state_dict_pre_hooks for part in module.modules()):
        return module.state_dict()
    found = dict(module.named_parameters(remove_duplicate=False))
    for prefix, part in module.named_modules():
        kept = {name: t for name, t in part._buffers.items() if name not in part._non_persistent_buffers_set}
        found |= {f"{prefix}.{name}".lstrip("."): t for name, t in kept.items() if t is not None}
    return found


def module_dtype(module: nn.Module) -> str:
    """Returns the name of the dtype of a module's first floating-point parameter."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    raise PlanError(f"{type(module).__name__} has no floating-point weights; a plan needs a model that has")


def model_hash(model: nn.Module) -> str:
    """Returns a hash of all weights of a model but its head and pooler, which differ between the classes of a model."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, model) if prefix else model
    digest = hashlib.sha256()
    for name, parameter in sorted(base.named_parameters()):
        if name.startswith("pooler."):
            continue
        digest.update(name.encode())
        digest.update(_sampled(_present(base, name, parameter)))
    return f"{_WHOLE}{digest.hexdigest()}"


def _sampled(parameter: torch.Tensor) -> bytes:
    """Returns shape, dtype and up to 65,536 evenly spaced entries of a tensor; a sharded one is gathered first."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    flat = whole.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    # a copy: memory that numpy has seen cannot be freed any more, as FSDP does with gathered weights
    entries = flat[::step].clone().cpu().view(torch.uint8).numpy().tobytes()
    return f"{tuple(parameter.shape)} {parameter.dtype}".encode() + entries


class Resolved(NamedTuple):
    """What became of a module's part of a plan.

    Attributes:
        raw: The settings that held the plan.
        program: The module's part, None if the module is exact.
        weights: The module's weights when they were checked.
        held: The settings again, empty where they are no mapping, and so hold no plan.
        plan: What they held, which may be set anew in place.
        trained: Whether the module was trained under its part since its weights were looked at.
    """

    raw: Any
    program: Program | None
    weights: Weights
    held: Mapping[str, Any]
    plan: Any
    trained: bool = False

    @classmethod
    def of(cls, module: nn.Module, raw: Any, program: Program | None) -> Resolved:
        """What became of a module's part of the plan that its settings hold now."""
        held = raw if isinstance(raw, Mapping) else {}
        trained = module.training and trains(program)
        return cls(raw, program, Weights.of(module), held, held.get(CONFIG_KEY), trained)


def resolved(slots: Mapping[str, Any], raw: Any, compiling: bool = False) -> Resolved | None:
    """Returns what became of a module's part of a plan, None if settings or weights have changed since.

    Args:
        slots: Where the module keeps it: its own dictionary, or a seat's.
        raw: The settings at work.
        compiling: Whether a graph is being traced: weights are not looked at then.
    """
    known: Resolved | None = slots.get(PROGRAM_SLOT)
    if known is None or known.raw is not raw or known.held.get(CONFIG_KEY) is not known.plan:
        return None
    if known.trained:
        return known if compiling or slots["training"] else None
    return known if compiling or known.program is None or known.weights.same() else None


def _after_training(module: nn.Module, known: Resolved) -> Resolved:
    """What a module's part becomes when training under it has ended or pauses.

    Optimizers may write into weights without a trace (fused ones count no version), so that hashes are compared.
    """
    if known.program is not None and weight_hash(module) != known.program.plan.weights:
        say_unproven(str(known.plan.get("weight_hash")))
    return Resolved.of(module, known.raw, known.program)


def program_of(module: nn.Module, tensors: TensorsOf, compiling: bool = False) -> Program | None:
    """Returns an attention module's part of the plan, `None` if the module is exact.

    Args:
        module: An attention module; the result is cached in it.
        tensors: Finds the layer's calibrated tensors if the plan has any.
        compiling: Whether a graph is being traced: nothing is read then.

    Raises:
        PlanError: If the plan does not belong to the module.
    """
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
    if known is not None:
        if module.training and not (known.trained or compiling) and trains(known.program):
            slots[PROGRAM_SLOT] = known._replace(trained=True)
        return known.program
    before: Resolved | None = slots.get(PROGRAM_SLOT)
    if (
        before is not None
        and before.trained
        and before.raw is raw
        and before.held.get(CONFIG_KEY) is before.plan
    ):
        slots[PROGRAM_SLOT] = _after_training(module, before)
        return before.program
    if compiling:
        raise PlanError(
            "the plan was not read before compiling; call the model once, or adaattn_hf.load_plan(model), "
            "before torch.compile"
        )
    program = resolve(module, raw, tensors)
    check_model(module, raw)
    slots[PROGRAM_SLOT] = Resolved.of(module, raw, program)
    return program


def resolve(module: nn.Module, raw: Any, tensors: TensorsOf) -> Program | None:
    """Resolves and checks a module's part of the plan in its settings; `None` if the module is exact.

    Raises:
        PlanError: If the plan does not belong to the module.
    """
    data = raw.get(CONFIG_KEY) if isinstance(raw, Mapping) else None
    if data is None:
        return None
    plan = Plan.from_dict(data)
    index = getattr(module, "layer_idx", None)
    layer = plan.layer(index)
    config: Any = module.config
    if plan.model_type != config.model_type:
        raise PlanError(
            f"the plan was made for model type {plan.model_type!r}, this is {config.model_type!r}"
        )
    check_versions(plan)
    if index is None and plan.protocol.get(OWN_NUMBERS):
        layer = _layer_by_weights(module, plan)
        index = layer.layer
    depth = getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int) and plan.layers and plan.layers[-1].layer >= depth:
        raise PlanError(
            f"the plan has a layer {plan.layers[-1].layer}, the model has {depth}; calibrate this model"
        )
    if layer is None or index is None or layer.is_exact:
        return None
    if not (plan.verified is not None and plan.verified.passed) and raw.get(UNVERIFIED) is not True:
        why = "was never verified on held-out text" if plan.verified is None else "failed on held-out text"
        raise PlanError(
            f"the plan {why}, so it runs only where you say so: adaattn_hf.load_plan(model, unverified=True), or "
            f"config.adaattn[{UNVERIFIED!r}] = True; or calibrate again, or remove it with "
            "adaattn_hf.remove_plan(model)"
        )
    dtype = module_dtype(module)
    if dtype != plan.dtype:
        raise PlanError(
            f"the plan was calibrated in {plan.dtype}, the model is loaded in {dtype}; load it with "
            f"dtype=torch.{plan.dtype}, or calibrate it in {dtype}"
        )
    if weight_hash(module) != layer.weights:
        raise PlanError(
            f"the weights of layer {index} are not those that the plan was calibrated on (fine-tuned, another model); "
            "calibrate again, or remove it with adaattn_hf.remove_plan(model)"
        )
    source = getattr(config, "_name_or_path", None)
    found = tensors(plan, index, source, raw) if plan.tensors else LayerTensors()
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(getattr(config, "hidden_size", None), int):
        head_dim = config.hidden_size // config.num_attention_heads
    for head, choice in enumerate(layer.choices):
        for part in choice.parts:
            wrong = part.misfit(found, head, len(layer.choices), head_dim)
            if wrong is not None:
                raise PlanError(f"plan of layer {index}: {wrong}; calibrate again")
    own = _own_heads(module, index, len(layer.choices), head_dim)
    return Program(layer, found, plan.max_length, own, plan.exact_steps)


def _own_heads(module: nn.Module, index: int, kv_heads: int, head_dim: int | None) -> range:
    """Returns the key/value heads of this process under tensor parallelism by whole heads, else an empty range.

    Raises:
        PlanError: The weights are sharded in another way.
    """
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


def check_model(module: nn.Module, raw: Any) -> None:
    """Checks the weights of the whole model that a module belongs to, once.

    The model is the outermost one whose forward pass is on the call stack.

    Raises:
        PlanError: If they are not those that the plan was calibrated on.
    """
    data = raw.get(CONFIG_KEY) if isinstance(raw, Mapping) else None
    # looking at frames makes them keep what they hold, so it is not done for plans that name no hash of the model
    if data is None or not str(data.get("weight_hash")).startswith(_WHOLE):
        return
    models = [model for model in _around(module) if hasattr(model, "base_model_prefix")]
    if models and models[-1].__dict__.get(_CHECKED) is not data:
        refuse_other_weights(models[-1], str(data.get("weight_hash")))
        models[-1].__dict__[_CHECKED] = data


def refuse_other_weights(model: nn.Module, weights: str) -> None:
    """Refuses a model whose weights have another hash than a plan names; plans of earlier versions name no such hash.

    Raises:
        PlanError: If they have.
    """
    if weights.startswith(_WHOLE) and model_hash(model) != weights:
        raise PlanError(
            "the weights of the model are not those that the plan was calibrated on (fine-tuned, merged, another "
            "checkpoint); calibrate again, or remove it with adaattn_hf.remove_plan(model)"
        )


def _around(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules on the call stack that contain this one, innermost first."""
    frame, inner = sys._getframe(1), module
    while frame is not None:
        outer = frame.f_locals.get("self")
        if isinstance(outer, nn.Module) and outer is not inner and any(m is inner for m in outer.modules()):
            inner = outer
            yield inner
        frame = frame.f_back  # type: ignore[assignment]


def _layer_by_weights(module: nn.Module, plan: Plan) -> LayerPlan:
    """Finds the layer of a module without a layer index by its weights; such plans hold all layers, exact ones too.

    Raises:
        PlanError: If no layer of the plan has the module's weights.
    """
    own = weight_hash(module)
    for layer in plan.layers:
        if layer.weights == own:
            return layer
    raise PlanError(
        f"the weights of this {type(module).__name__} are not those of any layer that the plan was calibrated on "
        "(fine-tuned, another model or dtype); calibrate again, or remove it with adaattn_hf.remove_plan(model)"
    )


def check_versions(plan: Plan) -> None:
    """Refuses a plan of another major version of Transformers.

    Raises:
        PlanError: If the major versions differ.
    """
    here = importlib.metadata.version("transformers")
    if here.split(".")[0] != plan.transformers.split(".")[0]:
        raise PlanError(
            f"the plan was made with transformers {plan.transformers}, this is {here}: another major version may "
            "compute another function; calibrate again"
        )
