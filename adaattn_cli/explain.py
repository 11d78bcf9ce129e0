"""`adaattn explain`: shows which backend and plan each layer runs, and why not other backends. Needs no weights."""

from typing import Any

import torch
import typer

import adaattn_hf
from adaattn_hf.errors import ModelUnavailable, UsageError, unknown
from adaattn_hf.patches import checkpoint
from adaattn_hf.patches.models.support import unloaded
from adaattn_hf.patches.plans.attach import plan_in

from .ending import ending
from .options import Done, Options


def run(options: Options) -> Done:
    """Prints what runs in each layer, or returns it."""
    adaattn_hf.register(impossible=True)  # the device need not be here
    ours = [name for name in checkpoint.known_implementations() if name.startswith("adaattn")]
    with ending():
        if options.attn_implementation not in ours:
            named = [one for one in ours if "|" not in one]  # the others are for continuous batching
            raise UsageError(unknown("attn_implementation", options.attn_implementation, named))
        where = checkpoint.resolve_device(options.device, here=False)
        config = checkpoint.read_config(options.model, **options.source())
        kind: Any = checkpoint.resolve_dtype(checkpoint.dtype_for(options.dtype, (options.plan,), config, "auto"))
        kind = (config.dtype or torch.float32) if kind == "auto" else kind
        try:
            ghost = unloaded(config, options.attn_implementation)
            how: dict[str, Any] = {"cache": options.cache, "streaming": options.streaming, "verbose": options.verbose}
            plan = plan_in(ghost) if options.plan is None else options.plan  # the checkpoint's, as after `load_plan`
            explanation = adaattn_hf.explain(ghost, device=where.type, dtype=kind, plan=plan, **how)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise ModelUnavailable(
                f"model: cannot explain {options.model!r} with {options.attn_implementation!r}: "
                f"{checkpoint.why_not(options.model, error)}"
            ) from error
    if not options.as_json:
        typer.echo(str(explanation))
    layers = [{**vars(choice), "call": choice.kind.words()} for choice in explanation.layers]
    for layer in layers:
        del layer["kind"]
    record: dict[str, Any] = {
        "model": explanation.model,
        "implementation": explanation.implementation,
        "layers": layers,
        "unknown": explanation.unknown,
    }
    if (memory := explanation.cache) is not None:
        record["cache"] = {
            "stored": memory.stored, "bytes_per_token": memory.per_token, "bytes_per_sequence": memory.per_sequence,
            "streaming_heads": list(memory.streaming),
        }  # fmt: skip
    return Done(record)
