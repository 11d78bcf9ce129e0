"""Where a plan lives: in `config.adaattn["plan"]`, with bases and means in a safetensors file beside the weights.

Each attention module resolves its own part of the plan at its first call and checks it: the hash of its
weights, its dtype, the number of its key/value heads, the major version of Transformers. Whatever does not
fit is refused with the reason; nothing is ignored in silence.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from adaattn_hf.approximate import LayerTensors, Program
from adaattn_hf.plan import TENSORS_FILE, LayerPlan, Plan, PlanError

CONFIG_KEY = "plan"
PROGRAM_SLOT = "_adaattn_program"
"""Where an attention module keeps `(settings, program)` once its plan was read."""
OWN_NUMBERS = "layers_by_weights"
"""Set in the protocol of a plan whose layers had no number of their own; it holds them all, exact ones too."""
_NUMBERED = "_adaattn_numbered"
_SAMPLES = 65536
_tensors: dict[str, dict[str, Tensor]] = {}


def weight_hash(module: nn.Module) -> str:
    """Returns a hash of a module's own weights: name, shape, dtype and up to 65,536 spread entries of each."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.state_dict().items()):
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def module_dtype(module: nn.Module) -> str:
    """Returns the name of the dtype of a module's first floating-point parameter."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    raise PlanError(f"{type(module).__name__} has no floating-point weights; a plan needs a model that has")


def remember_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Keeps bases and means for `program_of`, and returns the hash that names them; empty for none."""
    if not tensors:
        return ""
    name = hashlib.sha256(save(dict(tensors))).hexdigest()
    _tensors[name] = dict(tensors)
    return name


def tensor_bytes(plan: Plan) -> bytes | None:
    """Returns the safetensors file of a plan whose tensors are in memory, `None` for a plan without any."""
    if not plan.tensors:
        return None
    return save(_found(plan, None))


def read_tensors(plan: Plan, directory: str | Path | None) -> None:
    """Reads the plan's safetensors file, checking its hash.

    Raises:
        PlanError: If the file is absent or is another than the plan names.
    """
    if plan.tensors and plan.tensors not in _tensors:
        _found(plan, str(directory) if directory is not None else None)


def _found(plan: Plan, source: str | None) -> dict[str, Tensor]:
    if plan.tensors in _tensors:
        return _tensors[plan.tensors]
    path = _file(source)
    if path is None:
        raise PlanError(
            f"the plan needs {TENSORS_FILE}, which is not in {source!r}; copy it beside the weights, or call "
            "adaattn_hf.load_plan(model, directory) with the directory that holds it"
        )
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != plan.tensors:
        raise PlanError(
            f"{path} has hash {found[:12]}…, the plan names {plan.tensors[:12]}…; calibrate again"
        )
    _tensors[plan.tensors] = load(data)
    return _tensors[plan.tensors]


def _file(source: str | None) -> Path | None:
    if not source:
        return None
    path = Path(source) / TENSORS_FILE
    if path.is_file():
        return path
    # what is no name of a repository (`owner/name`) is a directory that is not there
    if path.parent.is_dir() or source.count("/") != 1 or source.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, TENSORS_FILE)
    return Path(cached) if isinstance(cached, str) else None


def program_of(module: nn.Module, compiling: bool = False) -> Program | None:
    """Returns what the plan says about an attention module, `None` where it is exact.

    Raises:
        PlanError: If the plan does not belong to the module.
    """
    raw = getattr(getattr(module, "config", None), "adaattn", None)
    if raw is None:
        return None
    known = module.__dict__.get(PROGRAM_SLOT)
    if known is not None and known[0] is raw:
        program: Program | None = known[1]
        return program
    if compiling:
        raise PlanError(
            "the plan was not read before compiling; call the model once, or adaattn_hf.load_plan(model), "
            "before torch.compile"
        )
    program = _resolve(module, raw)
    module.__dict__[PROGRAM_SLOT] = (raw, program)
    return program


def _resolve(module: nn.Module, raw: Any) -> Program | None:
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
    if layer is None or index is None or layer.is_exact:
        return None
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
    tensors = (
        _layer_tensors(plan, index, getattr(config, "_name_or_path", None))
        if plan.tensors
        else LayerTensors()
    )
    return Program(layer, tensors, plan.max_length)


def _layer_by_weights(module: nn.Module, plan: Plan) -> LayerPlan:
    """The layer of a module without a number; plans of such models hold all layers, exact ones too.

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


def _layer_tensors(plan: Plan, index: int, source: str | None) -> LayerTensors:
    tensors = _found(plan, source)
    prefix = f"layers.{index}."
    bases: dict[str, dict[int, Tensor]] = {"query_basis": {}, "key_basis": {}}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            kind, _, head = name.removeprefix(prefix).partition(".")
            if kind in bases:
                bases[kind][int(head)] = tensor
    return LayerTensors(tensors.get(f"{prefix}key_mean"), bases["query_basis"], bases["key_basis"])


def attach(model: nn.Module, plan: Plan, directory: str | Path | None = None) -> None:
    """Gives a model a plan and checks it against every layer at once.

    Args:
        model: A model whose attention modules know their `layer_idx`.
        plan: The plan.
        directory: Where the plan's safetensors file lies, when its tensors are not in memory.

    Raises:
        PlanError: If the plan does not belong to the model, or names a layer that it does not have.
    """
    if directory is not None:
        read_tensors(plan, directory)
    modules = dict(attention_modules(model, plan.model_type))
    missing = [layer.layer for layer in plan.layers if layer.layer not in modules]
    if missing:
        raise PlanError(f"the plan has layers {missing}, the model's attention layers are {sorted(modules)}")
    raw = {CONFIG_KEY: plan.to_dict()}
    for module in modules.values():
        _resolve(module, raw)
    owners: dict[int, Any] = {id(module.config): module.config for module in modules.values()}
    for config in owners.values():
        present = getattr(config, "adaattn", None)
        config.adaattn = {**(present if isinstance(present, Mapping) else {}), **raw}
    for module in modules.values():
        program_of(module)


def read_plan(path: str | Path) -> Plan:
    """Returns the plan in a JSON file, or in the `adaattn_plan.json` or `config.json` of a model directory.

    Raises:
        PlanError: If there is none.
    """
    file = Path(path)
    if file.is_dir():
        own = file / "adaattn_plan.json"
        file = own if own.is_file() else file / "config.json"
    if not file.is_file():
        raise PlanError(
            f"{file} does not exist; expected a plan, or a directory that `adaattn calibrate` wrote"
        )
    text = file.read_text(encoding="utf-8")
    if file.name != "config.json":
        return Plan.from_json(text)
    data = (json.loads(text).get("adaattn") or {}).get(CONFIG_KEY)
    if data is None:
        raise PlanError(f"{file} carries no plan; make one with `adaattn calibrate`")
    return Plan.from_dict(data)


def remove_plan(model: nn.Module) -> None:
    """Takes the plan out of a model: every layer is exact again."""
    for module in model.modules():
        module.__dict__.pop(PROGRAM_SLOT, None)
        config: Any = getattr(module, "config", None)
        present = getattr(config, "adaattn", None)
        if config is not None and isinstance(present, Mapping) and CONFIG_KEY in present:
            rest = {key: value for key, value in present.items() if key != CONFIG_KEY}
            if rest:
                config.adaattn = rest
            else:
                del config.adaattn


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model carries, or `None`."""
    for module in model.modules():
        present = getattr(getattr(module, "config", None), "adaattn", None)
        if isinstance(present, Mapping) and present.get(CONFIG_KEY) is not None:
            return Plan.from_dict(present[CONFIG_KEY])
    return None


def load_plan(model: nn.Module, directory: str | Path | None = None) -> Plan:
    """Reads a model's plan and checks it against every layer at once.

    The plan is the one in the directory; without a directory, or where that holds bases and means alone, the one in
    the model's configuration.

    Without it every layer reads its part in the first forward pass; a graph needs it before it is traced.

    Args:
        model: A model, as `from_pretrained` leaves it.
        directory: Where `adaattn calibrate` wrote the plan, when that is not where the model was loaded from.

    Returns:
        The plan.

    Raises:
        PlanError: The model has no plan, or one that does not belong to it, or runs another attention.
    """
    plan = plan_of(model)
    if directory is not None and (plan is None or _holds_plan(Path(directory))):
        plan = read_plan(directory)
    if plan is None:
        raise PlanError(
            f"model: the configuration of this {type(model).__name__} holds no plan; make one with "
            "`adaattn calibrate`"
        )
    names = _implementations(model)
    if names and not any(name.startswith("adaattn") for name in names):
        raise PlanError(
            f"model: its attention implementation is {', '.join(sorted(names))}, which knows no plans; load it with "
            'attn_implementation="adaattn" or call model.set_attn_implementation("adaattn") first'
        )
    attach(model, plan, directory)
    return plan


def _holds_plan(path: Path) -> bool:
    """Whether a file or directory holds a plan; one may hold a plan's bases and means alone."""
    if path.is_file() or (path / "adaattn_plan.json").is_file():
        return True
    config = path / "config.json"
    if not config.is_file():
        return False
    return CONFIG_KEY in (json.loads(config.read_text(encoding="utf-8")).get("adaattn") or {})


def _implementations(model: nn.Module) -> set[str]:
    """Names of the attention implementations of a model's towers."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    found = {getattr(config, "_attn_implementation", None) for config in configs.values()}
    return {name for name in found if isinstance(name, str)}


def attention_modules(model: nn.Module, model_type: str) -> Iterator[tuple[int, nn.Module]]:
    """Yields the innermost modules that know a `layer_idx` and hold weights, of the tower of that model type.

    Raises:
        PlanError: If two of them claim the same index: a plan could not tell them apart.
    """
    number_layers(model)
    seen: dict[int, str] = {}
    for name, module in model.named_modules():
        index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
        if not isinstance(index, int) or config is None or config.model_type != model_type:
            continue
        if not any(True for _ in module.parameters()) or not hasattr(module, "is_causal"):
            continue
        if index in seen:
            raise PlanError(
                f"{seen[index]} and {name} both are layer {index}; plans serve models of one attention per layer"
            )
        seen[index] = name
        yield index, module


def number_layers(model: nn.Module) -> bool:
    """Gives the attention modules of a model without any `layer_idx` (DistilBERT) theirs, in the order of the model.

    Returns:
        Whether the numbers are this package's.
    """
    modules = [
        module
        for module in model.modules()
        if hasattr(module, "is_causal")
        and hasattr(module, "config")
        and any(True for _ in module.parameters())
    ]
    numbered = [module for module in modules if isinstance(getattr(module, "layer_idx", None), int)]
    if not numbered:
        for index, module in enumerate(modules):
            module.layer_idx = index  # type: ignore[assignment]
            module.__dict__[_NUMBERED] = True
    return any(_NUMBERED in module.__dict__ for module in modules)
