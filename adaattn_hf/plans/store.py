"""Stores plans in `config.adaattn["plan"]`, with bases and means in a safetensors file beside the weights.

Each attention module resolves and checks its part of the plan at its first call (see `fit`); `load_plan` does so for
all of them at once.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor, nn

from . import execute as execute  # its operators are registered before a graph is traced
from . import fit
from .fit import CONFIG_KEY as CONFIG_KEY
from .fit import OWN_NUMBERS as OWN_NUMBERS
from .fit import PROGRAM_SLOT as PROGRAM_SLOT
from .hashes import model_hash as model_hash
from .hashes import weight_hash as weight_hash
from .parts import module_dtype as module_dtype
from .plan import TENSORS_FILE, Plan, PlanError
from .program import Program
from .reading import holds_plan
from .reading import read_plan as read_plan
from .running import Allowed
from .tensors import MOST_CARRIED, LayerTensors, carried_bytes

CARRIED = "tensors"
"""Key of the bases and means in a configuration's settings."""
REVOKED = "unverified"
"""Key of a permission that settings held in earlier versions; a file is not one to give it."""
_NUMBERED = "_adaattn_numbered"
_tensors: dict[str, dict[str, Tensor]] = {}
"""Bases and means of plans by their hash, those that were used last at the end."""
_MOST = 64
"""Plans whose bases and means are kept."""


def remember_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Keeps bases and means in memory, and returns their hash; empty if there are none.

    Those of the plans that were used last are kept; a plan whose tensors are gone needs its file again.
    """
    if not tensors:
        return ""
    name = hashlib.sha256(save(dict(tensors))).hexdigest()
    _kept(name, lambda: dict(tensors))
    return name


def _kept(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a hash, made now if they are not in memory."""
    found = _tensors.pop(name, None)
    found = _tensors[name] = make() if found is None else found
    while len(_tensors) > _MOST:
        del _tensors[next(iter(_tensors))]
    return found


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
    if plan.tensors:
        _found(plan, str(directory) if directory is not None else None)


def _found(plan: Plan, source: str | None, raw: Any = None) -> dict[str, Tensor]:
    return _kept(plan.tensors, lambda: _read(plan, source, raw))


def _read(plan: Plan, source: str | None, raw: Any) -> dict[str, Tensor]:
    """Returns the tensors from the directory that a model came from, or from its settings."""
    carried = raw.get(CARRIED) if isinstance(raw, Mapping) else None
    path = _file(source)
    if path is None and isinstance(carried, str):
        return _checked(plan, carried_bytes(carried), f"config.adaattn[{CARRIED!r}]")
    if path is None:
        raise PlanError(
            f"the plan needs {TENSORS_FILE}, which is not in {source!r}; copy it beside the weights, or call "
            "adaattn_hf.load_plan(model, directory) with the directory that holds it"
        )
    return _checked(plan, path.read_bytes(), str(path))


def _carry(plan: Plan, raw: Any) -> None:
    """Adds bases and means to a model's settings, so that they are saved with the model."""
    if isinstance(raw, dict) and raw.get(CARRIED) is None:
        data = tensor_bytes(plan)
        if data is not None and len(data) <= MOST_CARRIED:
            raw[CARRIED] = base64.b64encode(data).decode("ascii")


def _checked(plan: Plan, data: bytes, where: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file after comparing its hash with the plan's."""
    found = hashlib.sha256(data).hexdigest()
    if found != plan.tensors:
        raise PlanError(
            f"{where} has hash {found[:12]}…, the plan names {plan.tensors[:12]}…; calibrate again"
        )
    return load(data)


def _file(source: str | None) -> Path | None:
    if not source:
        return None
    path = Path(source) / TENSORS_FILE
    if path.is_file():
        return path
    # not a repository id (`owner/name`), so a directory that does not exist
    if path.parent.is_dir() or source.count("/") != 1 or source.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source, TENSORS_FILE)
    return Path(cached) if isinstance(cached, str) else None


def program_of(module: nn.Module, compiling: bool = False) -> Program | None:
    """Returns an attention module's part of the plan, `None` if the module is exact.

    Raises:
        PlanError: If the plan does not belong to the module.
    """
    return fit.program_of(module, _layer_tensors, compiling)


def _layer_tensors(plan: Plan, index: int, source: str | None, raw: Any) -> LayerTensors:
    tensors = _found(plan, source, raw)
    _carry(plan, raw)
    prefix = f"layers.{index}."
    bases: dict[str, dict[int, Tensor]] = {"query_basis": {}, "key_basis": {}}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            kind, _, head = name.removeprefix(prefix).partition(".")
            if kind in bases:
                bases[kind][int(head)] = tensor
    return LayerTensors(tensors.get(f"{prefix}key_mean"), bases["query_basis"], bases["key_basis"])


def attach(
    model: nn.Module, plan: Plan, directory: str | Path | None = None, *, unverified: bool = False
) -> None:
    """Gives a model a plan and checks it against every layer at once.

    Args:
        model: A model whose attention modules know their `layer_idx`.
        plan: The plan.
        directory: Where the plan's safetensors file lies, when its tensors are not in memory.
        unverified: Run the plan though held-out text has not shown it good.

    Raises:
        PlanError: If the plan does not belong to the model, or names a layer that it does not have.
    """
    modules, raw = settings_for(model, plan, directory, unverified=unverified)
    owners: dict[int, Any] = {id(module.config): module.config for module in modules.values()}
    for config in owners.values():
        kept = {name: value for name, value in settings_of(config).items() if name not in (CARRIED, REVOKED)}
        config.adaattn = {**kept, **raw}
    for module in modules.values():
        module.__dict__[PROGRAM_SLOT] = fit.settled(module, {}, module.config.adaattn, _layer_tensors)  # type: ignore[union-attr]


def settings_for(
    model: nn.Module, plan: Plan, directory: str | Path | None, *, unverified: bool
) -> tuple[dict[int, nn.Module], dict[str, Any]]:
    """Returns a model's attention modules by layer, and the settings that give them a plan, checked against each.

    Raises:
        PlanError: As `attach` does.
    """
    if directory is not None:
        read_tensors(plan, directory)
    modules = dict(attention_modules(model, plan.model_type))
    if not modules:
        own = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise PlanError(
            f"the plan was made for model type {plan.model_type!r}, this is {own!r}; give the plan of this model"
        )
    missing = [layer.layer for layer in plan.layers if layer.layer not in modules]
    if missing:
        raise PlanError(f"the plan has layers {missing}, the model's attention layers are {sorted(modules)}")
    data = plan.to_dict()
    raw: dict[str, Any] = {CONFIG_KEY: Allowed(data) if unverified else data}
    for module in modules.values():
        fit.resolve(module, raw, _layer_tensors)
    fit.refuse_other_weights(model, raw[CONFIG_KEY])
    return modules, raw


def programs_for(model: nn.Module, plan: Plan | str | Path) -> dict[int, Program | None]:
    """Returns the programs of a plan, or of the one in a file or directory, by layer; it need not be verified.

    Raises:
        PlanError: If it does not belong to the model.
    """
    modules, raw = settings_for(model, with_tensors(plan), None, unverified=True)
    return {index: fit.resolve(module, raw, _layer_tensors) for index, module in modules.items()}


def with_tensors(plan: Plan | str | Path) -> Plan:
    """Returns a plan, or the one in a file or directory, whose tensors lie beside it and are read, too."""
    if isinstance(plan, Plan):
        return plan
    path, plan = Path(plan), read_plan(plan)
    read_tensors(plan, path if path.is_dir() else path.parent)
    return plan


def remove_plan(model: nn.Module) -> None:
    """Removes the plan from a model: every layer is exact again."""
    for module in model.modules():
        module.__dict__.pop(PROGRAM_SLOT, None)
        config: Any = getattr(module, "config", None)
        settings = settings_of(config)
        if CONFIG_KEY in settings:
            ours = (CONFIG_KEY, CARRIED, REVOKED)
            rest = {name: value for name, value in settings.items() if name not in ours}
            # a plan of all models of the type is not given again
            if rest or hasattr(type(config), "adaattn"):
                config.adaattn = rest
            else:
                del config.adaattn


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that a model carries, or `None`."""
    data = _data_of(model)
    return None if data is None else Plan.from_dict(data)


def _data_of(model: nn.Module) -> Mapping[str, Any] | None:
    plans = (settings_of(getattr(module, "config", None)).get(CONFIG_KEY) for module in model.modules())
    return next((plan for plan in plans if plan is not None), None)


def settings_of(config: Any) -> Mapping[str, Any]:
    """Returns the settings of this package in a model's configuration, empty where there are none."""
    settings = getattr(config, "adaattn", None)
    return settings if isinstance(settings, Mapping) else {}


def load_plan(model: nn.Module, directory: str | Path | None = None, *, unverified: bool = False) -> Plan:
    """Reads a model's plan and checks it against every layer at once.

    The plan is the one in the directory; without a directory, or where that holds bases and means alone, the one in
    the model's configuration.

    Without it every layer reads its part in the first forward pass; a graph needs it before it is traced.

    Args:
        model: A model, as `from_pretrained` leaves it.
        directory: Where `adaattn calibrate` wrote the plan, when that is not where the model was loaded from.

        unverified: Run the plan though held-out text has not shown it good: it was never verified, or failed.

    Returns:
        The plan.

    Raises:
        PlanError: The model has no plan, or one that does not belong to it, or runs another attention.
    """
    data = _data_of(model)
    plan = None if data is None else Plan.from_dict(data)
    if directory is not None:
        path = Path(directory)
        if plan is None or holds_plan(path) or not (path / TENSORS_FILE).is_file():
            plan, data = read_plan(path), None
    if plan is None:
        raise PlanError(
            f"model: the configuration of this {type(model).__name__} holds no plan; make one with "
            "`adaattn calibrate`"
        )
    refuse_stock_attention(model)
    attach(model, plan, directory, unverified=unverified or isinstance(data, Allowed))
    return plan


def refuse_stock_attention(model: nn.Module) -> None:
    """Refuses a model whose attention cannot run plans.

    Raises:
        PlanError: If none of its towers is set to `adaattn…`.
    """
    names = implementations(model)
    if names and not any(name.startswith("adaattn") for name in names):
        raise PlanError(
            f"model: its attention implementation is {', '.join(sorted(names))}, which knows no plans; load it with "
            'attn_implementation="adaattn" or call model.set_attn_implementation("adaattn") first'
        )


def implementations(model: nn.Module) -> set[str]:
    """Returns the attention implementations of a model's towers."""
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
        if not _holds_weights(module) or not hasattr(module, "is_causal"):
            continue
        if index in seen:
            raise PlanError(
                f"{seen[index]} and {name} both are layer {index}; plans serve models of one attention per layer"
            )
        seen[index] = name
        yield index, module


def _holds_weights(module: nn.Module) -> bool:
    """Whether a module has weights; quantised ones lie in buffers."""
    return any(True for held in (module.parameters(), module.buffers()) for _ in held)


def number_layers(model: nn.Module) -> bool:
    """Numbers the attention modules of a model without any `layer_idx` (DistilBERT), in the order of the model.

    Returns:
        Whether this package has numbered them, now or before.
    """
    modules = [
        module
        for module in model.modules()
        if hasattr(module, "is_causal") and hasattr(module, "config") and _holds_weights(module)
    ]
    numbered = [module for module in modules if isinstance(getattr(module, "layer_idx", None), int)]
    if not numbered:
        for index, module in enumerate(modules):
            module.layer_idx = index  # type: ignore[assignment]
            module.__dict__[_NUMBERED] = True
    return any(_NUMBERED in module.__dict__ for module in modules)
