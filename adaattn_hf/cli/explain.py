"""`adaattn explain`: shows which backend and plan each layer runs, and why not other backends. Needs no weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import EvalError, ModelUnavailable, UsageError, unknown
from .interrupt import leave

if TYPE_CHECKING:
    from adaattn_hf import Explanation


def explain(
    model: Annotated[str, typer.Argument(help="Hub id or directory; only its configuration is read.")],
    impl: Annotated[str, typer.Option(help="Attention implementation.")] = "adaattn",
    dtype: Annotated[
        str, typer.Option(help="Explain for float32, bfloat16, float16 or auto (the config's).")
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            help="Explain for cpu or cuda, which need not be here. Default: cuda where there is one."
        ),
    ] = None,
    cache: Annotated[
        str, typer.Option(help="Explain for a cache that stores model (numbers), int8 or k8v4.")
    ] = "model",
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming", help="Count the bytes of a cache whose heads keep the plan's windows alone."
        ),
    ] = False,
    plan: Annotated[
        str | None, typer.Option(help="File or directory of a plan. Default: the one that MODEL carries.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model bring code.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, a record per layer and phase.")
    ] = False,
) -> None:
    """Print, per layer, which attention backend runs and every refusal of the others.

    Exit codes: 0 done; 2 usage; 4 model unavailable, or the named backend refuses it.
    """
    try:
        explanation = _explanation(
            model, impl, dtype, device, cache, streaming, plan, revision, gguf_file, trust_remote_code
        )
    except EvalError as error:
        leave(error)
    typer.echo(json.dumps(_record(explanation), indent=2) if as_json else str(explanation))


def _record(explanation: Explanation) -> dict[str, Any]:
    layers = [
        {
            "layer": choice.layer,
            "phase": choice.phase,
            "call": choice.spec.words(),
            "backend": choice.backend,
            "plan": choice.plan,
            "refused": {name: list(reasons) for name, reasons in choice.refused.items()},
        }
        for choice in explanation.layers
    ]
    record: dict[str, Any] = {
        "model": explanation.model,
        "implementation": explanation.implementation,
        "layers": layers,
    }
    memory = explanation.cache
    if memory is not None:
        record["cache"] = {
            "stored": memory.stored, "bytes_per_token": memory.per_token, "bytes_per_sequence": memory.per_sequence,
            "streaming_heads": list(memory.streaming),
        }  # fmt: skip
    return record


def _explanation(
    model: str,
    impl: str,
    dtype: str,
    device: str | None,
    cache: str,
    streaming: bool,
    plan: str | None,
    revision: str | None,
    gguf_file: str | None,
    trust_remote_code: bool,
) -> Explanation:
    import torch
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
    )  # fmt: skip

    import adaattn_hf
    from adaattn_hf.patches.cache.stored import CACHES
    from adaattn_hf.patches.checkpoint import (
        is_masked,
        known_implementations,
        resolve_device,
        resolve_dtype,
        why_not,
    )  # fmt: skip
    from adaattn_hf.plans.plan import PlanError
    from adaattn_hf.plans.reading import read_plan

    adaattn_hf.register(impossible=True)  # the device need not be here
    ours = [name for name in known_implementations() if name.startswith("adaattn")]
    if impl not in ours:
        raise UsageError(unknown("impl", impl, ours))
    if cache not in CACHES:
        raise UsageError(unknown("cache", cache, CACHES))
    where, wanted = resolve_device(device, here=False), resolve_dtype(dtype)
    keywords = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code or None}
    try:
        given = None if plan is None else read_plan(plan)
    except (PlanError, OSError) as error:
        raise UsageError(f"plan: {plan!r}: {error}") from error
    try:
        config = AutoConfig.from_pretrained(model, **{k: v for k, v in keywords.items() if v})
        names = " ".join(config.architectures or [])
        auto: Any = AutoModelForMaskedLM if "ForMaskedLM" in names else AutoModelForCausalLM
        # a GGUF file names no class
        unnamed = not names and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked(config)
        if not unnamed and not any(t in names for t in ("ForMaskedLM", "ForCausalLM", "LMHeadModel")):
            auto = AutoModel
        with torch.device("meta"):
            ghost = auto.from_config(config, attn_implementation=impl)
        kind: Any = (config.dtype or torch.float32) if wanted == "auto" else wanted
        return adaattn_hf.explain(
            ghost, device=where.type, dtype=kind, cache=cache, streaming=streaming, plan=given
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelUnavailable(
            f"model: cannot explain {model!r} with {impl!r}: {why_not(model, error)}"
        ) from error
