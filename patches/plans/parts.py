"""Which weights are a module's own: those inside the wrappers of adapters and compilers, not what wrappers add."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adaattn_hf.plans.record import PlanError

from ..models.positions import set_by_length

ADAPTERS = ("base_layer", "original_module")
"""Under these names adapters keep the layer that they wrap."""
_INNER = (*ADAPTERS, "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Part(NamedTuple):
    """A module within another one: its dotted name as if nothing were wrapped, itself, its wrappers from outside."""

    prefix: str
    module: nn.Module
    wrappers: tuple[nn.Module, ...]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Its buffers that are saved with it: quantised layers keep their weights there."""
        buffers, passing = self.module._buffers, self.module._non_persistent_buffers_set
        return {name: buffer for name, buffer in buffers.items() if buffer is not None and name not in passing}

    @property
    def weights(self) -> dict[str, Tensor]:
        """Its parameters and the buffers that are saved with it."""
        return {name: weight for name, weight in self.module._parameters.items() if weight is not None} | self.buffers

    @property
    def steady(self) -> dict[str, Tensor]:
        """Its buffers that no pass changes: all but the frequencies that some rotary embeddings set by the length."""
        kinds = getattr(self.module, "rope_type", None)
        each = kinds.values() if isinstance(kinds, Mapping) else (kinds,)
        if any(map(set_by_length, each)):
            return self.buffers
        buffers = self.module._buffers
        return {name: buffer for name, buffer in buffers.items() if buffer is not None and not buffer.is_meta}


def parts(module: nn.Module, prefix: str = "") -> Iterator[Part]:
    """Yields a module and all that it holds, looking through wrappers."""
    wrappers: list[nn.Module] = []
    while (inner := inner_of(module, _INNER)) is not None:
        wrappers.append(module)
        module = inner
    yield Part(prefix, module, tuple(wrappers))
    for name, child in module._modules.items():
        if child is not None:
            yield from parts(child, f"{prefix}{name}.")


def inner_of(module: nn.Module, names: Iterable[str]) -> nn.Module | None:
    """Returns the module that a wrapper keeps under one of the names, None for what wraps nothing."""
    return next((inner for name in names if (inner := module._modules.get(name)) is not None), None)


def saved_weights(module: nn.Module) -> dict[str, Any]:
    """Returns what a module saves, by names without wrappers: parameters, buffers, and states of quantised layers.

    Hooks are bypassed: FSDP frees gathered weights in its own in mid-forward. PlanError: a weight has no data.
    """
    saved: dict[str, Any] = {}
    for part in parts(module):
        state: dict[str, Any] = {}
        part.module._save_to_state_dict(state, part.prefix, False)
        # what accelerate's hook brings for the pass in the place of a weight that it offloaded
        offloaded = getattr(getattr(part.module, "_hf_hook", None), "weights_map", None)
        for name, weight in state.items():
            if not (isinstance(weight, Tensor) and weight.is_meta):
                saved[name] = weight
            elif offloaded is not None:
                saved[name] = offloaded[name.removeprefix(part.prefix)]
            else:
                raise PlanError(
                    f"{name} has no data (device 'meta'), expected the weights that the plan was made for; load them, "
                    "then the plan"
                )
    return saved


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor, or those that a subclass without memory of its own wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(piece := getattr(tensor, name), Tensor):  # a sharded one names its devices, too
            yield from pieces(piece)


def module_dtype(module: nn.Module) -> str:
    """Returns the name of the dtype that a module computes in.

    It is that of its first floating-point parameter or buffer; where all are quantised, that of its configuration.
    """
    inside = [*parts(module)]
    weights = [weight for part in inside for weight in part.module._parameters.values() if weight is not None]
    tensors = (*weights, *(buffer for part in inside for buffer in part.buffers.values()))
    weight_dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    dtype = getattr(getattr(module, "config", None), "dtype", None) if weight_dtype is None else weight_dtype
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{type(module).__name__} has no floating-point weights; a plan needs a model that has")
    return str(dtype).removeprefix("torch.")
