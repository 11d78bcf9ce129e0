"""Checks that a plan belongs to a model: its versions, verdict, settings and layers, each refused in words."""

import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from adaattn_hf.attention.tracing import any_autocast
from adaattn_hf.backends.capability import cpu_name
from adaattn_hf.backends.native.library import level_here
from adaattn_hf.config import AdaAttnConfig
from adaattn_hf.plans import wording
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.limits import unproven
from adaattn_hf.plans.plan import LayerPlan, Plan, PlanError
from adaattn_hf.plans.store import layer_tensors
from adaattn_hf.plans.tensors import LayerTensors

from ..models.positions import configs_of
from .configured import computes_by, other_model, refuse_other_settings
from .hashes import model_hash, weight_hash
from .layers import attention_modules
from .parts import module_dtype
from .snapshot import PLACE, is_stage


def configs_for(model: nn.Module, plan: Plan, unverified: bool) -> list[Any]:
    """Returns the configurations of a model's attention modules; PlanError if the plan is not for such a model.

    That is another model, major version of Transformers or number of layers, or a plan that must be `unverified` to
    run, as held-out text has not shown it good, or the format of its cache.
    """
    installed = importlib.metadata.version("transformers")
    if installed.split(".")[0] != plan.transformers.split(".")[0]:
        raise PlanError(
            f"the plan was made with transformers {plan.transformers}, this is {installed}: another major version may "
            "compute another function; calibrate again"
        )
    modules = dict(attention_modules(model, plan.model_type))
    configs = configs_of(modules.values())
    for config in configs or [getattr(model, "config", model)]:
        if (words := other_model(plan, config)) is not None:
            raise PlanError(f"plan: got {words}; give the plan of this model, or calibrate it")
        refuse_other_settings(plan.configuration, computes_by(config))
        depth = getattr(config, "num_hidden_layers", None)
        if isinstance(depth, int) and plan.layers and plan.layers[-1].layer >= depth:
            raise PlanError(
                f"the plan has a layer {plan.layers[-1].layer}, the model has {depth}; calibrate this model"
            )
    missing = [layer.layer for layer in plan.layers if layer.layer not in modules]
    if missing:
        raise PlanError(f"the plan has layers {missing!s:.200}, the model's attention layers are {sorted(modules)}")
    if not unverified and (reason := unproven(plan)) is not None:
        raise PlanError(
            f"the plan {reason}, so it runs only if you allow it in this process: "
            "adaattn_hf.load_plan(model, unverified=True); or calibrate again, or remove it with "
            "adaattn_hf.remove_plan(model)"
        )
    return configs


def bound_layer_for(
    module: nn.Module, plan: Plan, index: int, settings: Mapping[str, Any], owner: Any
) -> BoundLayer | None:
    """Returns a layer's part of a plan, ready to run, None if it is exact; PlanError for a misfit.

    `settings` are those of the model, which may carry the plan's tensors and are given them.
    """
    config: Any = module.config
    layer = plan.layer(index)
    if layer is None:
        return None
    heads, groups = getattr(config, "num_attention_heads", None), getattr(module, "num_key_value_groups", 1)
    if isinstance(heads, int) and isinstance(groups, int) and len(layer.choices) != heads // groups:
        raise PlanError(
            f"plan of layer {layer.layer}: made for {len(layer.choices)} key/value heads, the model has "
            f"{heads // groups}; give the plan of this model, or calibrate again"
        )
    source = getattr(config, "_name_or_path", None)
    tensors = layer_tensors(plan.tensors, layer.layer, source, settings) if plan.tensors else LayerTensors()
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(getattr(config, "hidden_size", None), int):
        head_dim = config.hidden_size // config.num_attention_heads
    for head, choice in enumerate(layer.choices):
        for part in choice.parts:
            if (wrong := part.misfit(tensors, head, len(layer.choices), head_dim)) is not None:
                raise PlanError(f"plan of layer {layer.layer}: {wrong}; calibrate again")
    local_heads = _own_heads(module, layer.layer, len(layer.choices), head_dim)
    return BoundLayer(layer, tensors, plan.max_length, local_heads, plan.exact_steps, plan.dtype, owner)


def _own_heads(module: nn.Module, index: int, kv_heads: int, head_dim: int | None) -> range:
    # this process's key/value heads under tensor parallelism, else none
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


def machine_name(device: torch.device) -> str:
    """Returns the name of a device, of a processor with the instruction set that the native kernels use."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_name()} ({level_here()})"


def allowed_by(budget: float) -> float:
    """Returns the largest budget of a plan, nats/token, within a relative rise of the perplexity."""
    return math.log1p(budget) * (1 + 1e-6)


def refuse_beyond_budget(budget: float, settings: Mapping[str, Any]) -> None:
    """Refuses a plan's budget, nats/token, above that of a model's settings (PlanError), where they have one."""
    limit = AdaAttnConfig(budget=settings.get("budget", 0.0)).budget
    if 0.0 < allowed_by(limit) < budget:
        raise PlanError(
            f"budget: got a plan for {wording.allowed(budget)} perplexity, expected at most +{100 * limit:g} %, as the "
            f"model's settings say (config.adaattn, set by a preset); calibrate with --budget {100 * limit:g}%, or "
            "allow more: adaattn_hf.configure(model, 'exact') sets no limit"
        )


def refuse_other_weights(
    plan: Plan, trunk: nn.Module, modules: Mapping[int, nn.Module], before: Mapping[str, str]
) -> Mapping[str, str]:
    """Refuses a model whose weights, or their dtype, are others than a plan names (PlanError says of which layer).

    A stage may hold some of those read `before`. Returns the hash of each weight of the whole model, by its name.
    """
    planned: list[LayerPlan] = [layer for index in modules if (layer := plan.layer(index)) is not None]
    for dtype in (module_dtype(modules[layer.layer]) for layer in planned):
        if dtype != plan.dtype:
            raise PlanError(
                f"the plan was calibrated in {plan.dtype}, the model is loaded in {dtype}; load it with "
                f"dtype=torch.{plan.dtype}, or calibrate it in {dtype}"
            )
    read: dict[str, str] = {}
    if model_hash(trunk, read) == plan.weight_hash:
        return read
    changed = next((layer.layer for layer in planned if weight_hash(modules[layer.layer]) != layer.weights), None)
    named = ([(PLACE.sub("", name, count=1), found) for name, found in each.items()] for each in (before, read))
    if changed is None and is_stage(before, *named):
        return before
    moved = "the model", "layers moved, another checkpoint"
    whose, why = moved if changed is None else (f"layer {changed}", "another model")
    raise PlanError(
        f"the weights of {whose} are not those that the plan was calibrated on (fine-tuned, merged, {why}); calibrate "
        "again, or remove it with adaattn_hf.remove_plan(model)"
    )


def refuse_autocast(plan: Plan, device: str) -> None:
    """Refuses autocast to another dtype than a plan was verified in (PlanError). Autocast leaves fp64 alone."""
    if not any_autocast() or plan.is_exact:
        return
    for kind in ("cpu", "cuda") if device == "meta" else (device,):  # offloaded weights are moved for each pass
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if torch.is_autocast_enabled(kind) and plan.dtype not in (dtype, "float64"):
            raise PlanError(
                f"autocast: the plan was calibrated in {plan.dtype}, autocast computes in {dtype}; leave autocast, "
                f"or load the model with dtype=torch.{dtype} and calibrate it so"
            )
