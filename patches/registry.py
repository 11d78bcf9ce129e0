"""Our names in Transformers' registries. Nothing of Transformers is replaced."""

from __future__ import annotations

from types import MappingProxyType

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from adaattn_hf.attention.request import CallSpec
from adaattn_hf.backends.select import BACKENDS, use_measured
from adaattn_hf.errors import unknown

from .interface import attention_function
from .masks import adaattn_mask

__all__ = ["NAMES", "engine_takes_names", "register", "resolve", "unregister"]

NAMES = MappingProxyType({"adaattn": None, **{f"adaattn_{name}": name for name in BACKENDS}})
"""`attn_implementation` -> backend that the name forces, None where one is chosen."""


def resolve(name: str) -> str | None:
    """The backend that an `attn_implementation` of ours forces, None where one is chosen.

    Raises:
        ValueError: No name of ours; lists them and the nearest.
    """
    if name not in NAMES:
        raise ValueError(unknown("attn_implementation", name, NAMES))
    return NAMES[name]


def _measured(spec: CallSpec, default: str) -> tuple[str, ...]:
    """What this machine's table says of a call, looked for at the first one."""
    from .tuned import preferred

    return preferred(spec, default)


def register() -> None:
    """Make the names known to Transformers, in this process. Harmless when repeated."""
    use_measured(_measured)
    for name, backend in NAMES.items():
        AttentionInterface.register(name, attention_function(backend))
        # without a mask function of the same name Transformers drops padding in silence
        AttentionMaskInterface.register(name, adaattn_mask)
        if engine_takes_names():
            from .paged import paged_function

            # with a mask function of this name the engine would ask it for a mask of the wrong size
            AttentionInterface.register(f"paged|{name}", paged_function(backend))


def engine_takes_names() -> bool:
    """Whether the installed Transformers runs continuous batching under `paged|NAME`."""
    return "paged|sdpa" in AttentionInterface._global_mapping


def unregister() -> None:
    """Take the names out again; models that carry them can no longer run."""
    for name in NAMES:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
        AttentionInterface._global_mapping.pop(f"paged|{name}", None)
