"""What caches under memory plans hold and lose: `python -m studies.cache_plans docs/results NAME=DIRECTORY …`.

A directory is what `adaattn calibrate MODEL --optimize memory --output-dir DIRECTORY` wrote. The page sets the bytes
per token of the cache that was proved beside those of Transformers' DynamicCache in 16 bits, and says what the proof
over the codes found; heads, proofs and settings are kept beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.errors import UsageError
from adaattn_hf.plans.plan import Plan

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HEAD = """# Caches under a loss budget

Written by `python -m studies.cache_plans` from `cache_plans.json`; do not edit. Heads with a window keep it and the
first keys alone (streaming heads), what is kept is stored as codes. The proof reads held-out text of another source as
decoding does, over that cache; bounds are one-sided, their level divided by the tries. A needle is a number somewhere
in a long text, which the model is asked for.

| model | tokens | budget | stored | bytes/token | DynamicCache, 16 bits | times smaller | Δnll over it | at most | \
level | needles: stock, plan | measured on |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def record(name: str, directory: Path) -> dict[str, Any]:
    """Returns what a calibration for memory wrote of a plan and its cache.

    Raises:
        UsageError: If the plan has no cache that was proved.
    """
    plan = Plan.from_pretrained(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    cache = plan.protocol.get("cache")
    if not cache or not cache["verified"]["passed"]:
        raise UsageError(f"directory: {directory} has no cache that was proved; calibrate with --optimize memory")
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    numbers = 2 * config["num_hidden_layers"] * heads * dim
    held = cache["share"] * BYTES[plan.dtype] * numbers
    return {
        "name": name, "tokens": plan.lengths[-1], "budget": plan.budget, "cache": cache,
        "bytes_per_token": held, "dynamic": 2 * numbers, "smaller": 2 * numbers / held, "protocol": plan.protocol,
        "alone": plan.to_dict()["verified"],
        "heads": {layer.layer: [choice.label for choice in layer.choices] for layer in plan.layers},
        "versions": {"adaattn": plan.adaattn, "torch": plan.torch, "transformers": plan.transformers},
    }  # fmt: skip


def page(records: Sequence[dict[str, Any]]) -> str:
    """The table of the records."""
    lines = [_HEAD]
    for one in records:
        proof = one["cache"]["verified"]
        needles = "–"
        if proof["retrieval_stock"] is not None:
            needles = f"{proof['retrieval_stock']:.0%}, {proof['retrieval_plan']:.0%}"
        lines.append(
            f"| {one['name']} | {one['tokens']:,} | {one['budget']:.2e} | {one['cache']['stored']} | "
            f"{one['bytes_per_token']:,.0f} | {one['dynamic']:,} | {one['smaller']:.2f} | {proof['delta_nll']:+.2e} | "
            f"{proof['upper']:+.2e} | {proof['confidence']:.2%} | {needles} | {one['protocol']['machine']} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Adds the plans that are named to those that are kept, and writes the page."""
    target, *named = map(str, sys.argv[1:] if arguments is None else arguments)
    kept = Path(target) / "cache_plans.json"
    records = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else []
    for entry in named:
        name, _, directory = entry.partition("=")
        new = record(name, Path(directory))
        records = [one for one in records if any(one[key] != new[key] for key in ("name", "tokens", "budget"))]
        records.append(new)
    write_atomically(kept, json_text(records, indent=1, sort_keys=True) + "\n")
    write_atomically(Path(target) / "cache_plans.md", page(records).encode())


if __name__ == "__main__":
    main()
