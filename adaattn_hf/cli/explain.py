"""`adaattn explain`: shows which backend and plan each layer runs, and why not other backends. Needs no weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adaattn_hf.eval.settings import DTYPE, Source

from ..errors import ModelUnavailable, UsageError, unknown
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json

if TYPE_CHECKING:
    from adaattn_hf import Explanation


@dataclass(frozen=True)
class Explained(Source):
    """Options: which calls to explain, and on which device.

    Attributes:
        attn_implementation: Attention implementation.
        dtype: Explain for this dtype; auto takes the config's.
        device: Explain for cpu or cuda, present or not. Default: cuda if there is one.
        cache: Explain for a cache that stores the model's dtype, or quantised codes.
        streaming: Count the bytes of a cache that keeps only the plan's windows.
        plan: File, directory or hub id of a plan. Default: the one that MODEL carries.
        verbose: Print every reason of every backend, also those for other devices.
    """

    attn_implementation: str = "adaattn"
    dtype: str = field(default="auto", metadata=DTYPE)
    device: str | None = None
    cache: str = field(default="model", metadata={"choices": ("model",), "names": ("attention/stored.py", "FORMATS")})
    streaming: bool = False
    plan: str | None = None
    verbose: bool = False


@with_options(asked=Explained)
def explain(
    model: Annotated[str, typer.Argument(help="Hub id or directory; only its configuration is read.")],
    *,
    asked: Explained,
    as_json: AsJson = False,
) -> None:
    """Print which attention backend runs in each layer, and why the others do not.

    Exit codes: 0 done; 2 usage; 4 model unavailable, or the named backend refuses it.
    """
    with ending():
        explanation = _explanation(model, asked)
    if as_json:
        print_json(_record(explanation))
    else:
        typer.echo(str(explanation))


def _record(explanation: Explanation) -> dict[str, Any]:
    layers = [{**vars(choice), "call": choice.spec.words()} for choice in explanation.layers]
    for layer in layers:
        del layer["spec"]
    record: dict[str, Any] = {
        "model": explanation.model,
        "implementation": explanation.implementation,
        "layers": layers,
        "unknown": explanation.unknown,
    }
    memory = explanation.cache
    if memory is not None:
        record["cache"] = {
            "stored": memory.stored, "bytes_per_token": memory.per_token, "bytes_per_sequence": memory.per_sequence,
            "streaming_heads": list(memory.streaming),
        }  # fmt: skip
    return record


def _explanation(model: str, asked: Explained) -> Explanation:
    import torch

    import adaattn_hf
    from adaattn_hf.patches.checkpoint import known_implementations, resolve_device, resolve_dtype, why_not
    from adaattn_hf.patches.models.support import unloaded
    from adaattn_hf.plans.plan import Plan, PlanError

    adaattn_hf.register(impossible=True)  # the device need not be here
    ours = [name for name in known_implementations() if name.startswith("adaattn")]
    if asked.attn_implementation not in ours:
        raise UsageError(unknown("attn_implementation", asked.attn_implementation, ours))
    where, wanted = resolve_device(asked.device, here=False), resolve_dtype(asked.dtype)
    try:
        given = None if asked.plan is None else Plan.from_pretrained(asked.plan)
    except (PlanError, OSError) as error:
        raise UsageError(f"plan: {asked.plan!r}: {error}") from error
    try:
        ghost = unloaded(model, asked.attn_implementation, **asked.source())
        return adaattn_hf.explain(
            ghost,
            device=where.type,
            dtype=wanted if isinstance(wanted, torch.dtype) else ghost.dtype,
            cache=asked.cache,
            streaming=asked.streaming,
            plan=given,
            verbose=asked.verbose,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelUnavailable(
            f"model: cannot explain {model!r} with {asked.attn_implementation!r}: {why_not(model, error)}"
        ) from error
