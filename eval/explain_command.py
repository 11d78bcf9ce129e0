"""`adaattn explain`: per layer, which backend runs and why not the others. Needs the configuration alone."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from adaattn_hf.eval.errors import EvalError, ModelUnavailable, UsageError, leave, unknown


def explain(
    model: Annotated[str, typer.Argument(help="Hub id or directory; only its configuration is read.")],
    impl: Annotated[str, typer.Option(help="Attention implementation.")] = "adaattn",
    dtype: Annotated[
        str, typer.Option(help="Explain for float32, bfloat16, float16 or auto (the config's).")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Explain for cpu or cuda. Default: cuda where there is one.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file within MODEL.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model bring code.")
    ] = False,
) -> None:
    """Print, per layer, which attention backend runs and every refusal of the others.

    Exit codes: 0 done; 2 usage; 4 model unavailable, or the named backend refuses it.
    """
    try:
        text = _explanation(model, impl, dtype, device, revision, gguf_file, trust_remote_code)
    except EvalError as error:
        leave(error)
    typer.echo(text)


def _explanation(
    model: str,
    impl: str,
    dtype: str,
    device: str | None,
    revision: str | None,
    gguf_file: str | None,
    trust_remote_code: bool,
) -> str:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    import adaattn_hf
    from adaattn_hf.eval.checkpoint import known_implementations, resolve_device, resolve_dtype, why_not

    ours = [name for name in known_implementations() if name.startswith("adaattn")]
    if impl not in ours:
        raise UsageError(unknown("impl", impl, ours))
    where, wanted = resolve_device(device), resolve_dtype(dtype)
    keywords = {"revision": revision, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code or None}
    try:
        config = AutoConfig.from_pretrained(model, **{k: v for k, v in keywords.items() if v})
        names = " ".join(config.architectures or [])
        auto: Any = AutoModelForMaskedLM if "ForMaskedLM" in names else AutoModelForCausalLM
        auto = auto if any(t in names for t in ("ForMaskedLM", "ForCausalLM", "LMHeadModel")) else AutoModel
        with torch.device("meta"):
            ghost = auto.from_config(config, attn_implementation=impl)
        kind: Any = (config.dtype or torch.float32) if wanted == "auto" else wanted
        return str(adaattn_hf.explain(ghost, device=where.type, dtype=kind))
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelUnavailable(
            f"model: cannot explain {model!r} with {impl!r}: {why_not(model, error)}"
        ) from error
