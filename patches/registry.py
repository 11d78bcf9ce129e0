"""Registers the attention names `adaattn` and `adaattn_<backend>` with Transformers; replaces nothing there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from adaattn_hf.backends.select import BACKENDS, may_run_here

from .call.interface import attention_function
from .mask.masks import adaattn_mask

NAMES = MappingProxyType({"adaattn": None, **{f"adaattn_{name}": name for name in BACKENDS}})
"""Maps each `attn_implementation` to the backend that it forces, or to None where one is chosen per kind of call."""


def register(*, impossible: bool = False) -> None:
    """Register the names with Transformers in this process. May be called again.

    A backend that can serve nothing here has no name, so that Transformers refuses it when a model is loaded or set to
    it: one for CUDA beside a torch that was built without, or one whose package is not installed. `check` says why.

    Args:
        impossible: Register those names, too: to explain what a model would run elsewhere.
    """
    for name, backend in NAMES.items():
        if impossible or backend is None or may_run_here(backend):
            AttentionInterface.register(name, attention_function(backend))
            # without a mask function under the same name Transformers silently ignores padding
            AttentionMaskInterface.register(name, adaattn_mask)
            # no mask function under this name: the engine's requests are told apart by their lengths
            AttentionInterface.register(engine_name(name), partial(_attend_requests, backend))


def _attend_requests(backend: str | None, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    # few processes need what it imports
    from .call.batching import attend_requests, continuous_batching_runs_outside_graphs

    attend = continuous_batching_runs_outside_graphs if torch.compiler.is_compiling() else attend_requests
    return attend(backend, *args, **kwargs)


def engine_name(name: str) -> str:
    """The name by which the installed engine of continuous batching calls the function of an `attn_implementation`.

    Transformers 5.17 and 5.18 put `paged|` in front of any name; later ones let in names that hold `flash` alone.
    """
    return f"paged|{name}" if "paged|sdpa" in AttentionInterface._global_mapping else f"{name}|flash"


@contextmanager
def continuous_batching(model: nn.Module) -> Iterator[transformers.ContinuousBatchingConfig]:
    """Lets Transformers' engine of continuous batching run a model inside the `with` block, by its plan if it has one.

        with adaattn_hf.continuous_batching(model) as engine:
            answers = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=engine)

    The engine (`generate_batch`, `init_continuous_batching`) goes by the name of a model's attention alone: it refuses
    `adaattn`, and where flash-attn can be had it changes the model to that, which drops a plan. In the block the
    configuration holds a name that the engine lets in. The block is the model's, for all threads: managers are to be
    stopped in it, and other calls of the model wait for its end. A name that is set meanwhile stays.

    Args:
        model: A model set to `adaattn…`.

    Yields:
        Settings of the engine: on a GPU steps without prompts are captured as CUDA graphs, and prepared while others
        run.

    Raises:
        ValueError: None of its towers is.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    named = [(config, getattr(config, "_attn_implementation", None)) for config in configs.values()]
    ours = [(config, str(name)) for config, name in named if name in NAMES]
    if not ours:
        got = ", ".join(sorted({repr(name) for _, name in named})) or None
        raise ValueError(
            f"model: got attention {got}, expected 'adaattn'; call "
            'model.set_attn_implementation("adaattn"), and open one block at a time'
        )
    from .call.batching import engine_settings

    try:
        for config, name in ours:
            config._attn_implementation = {"": engine_name(name)}
        yield engine_settings(model)
    finally:
        for config, name in ours:
            if config._attn_implementation == engine_name(name):
                config._attn_implementation = {"": name}


def unregister() -> None:
    """Remove the names again; models that are set to one of them can no longer run."""
    for name in (*NAMES, *map(engine_name, NAMES)):
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
