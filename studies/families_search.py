"""How long the search for a plan takes on models of other families: `python -m studies.families_search DIRECTORY …`.

Each DIRECTORY is one that `studies.families` made. `adaattn calibrate` runs on it as a user runs it, on the processor,
and what it proved is written down beside the seconds that it took: `families.json` and `families.md` in `--write`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.eval.provenance import provenance

from .second_model import budget as proved
from .second_model import of_budget

app = typer.Typer(add_completion=False)


def searched(directory: Path, budget: str, length: int, threads: int) -> dict[str, Any]:
    """Calibrates one model from the beginning, and returns its shape, the seconds, and what was proved.

    Raises:
        RuntimeError: `adaattn calibrate` failed; its last words are in the message.
    """
    config = AutoConfig.from_pretrained(directory)
    kept = directory / "plan"
    shutil.rmtree(kept, ignore_errors=True)
    command = [
        sys.executable, "-m", "adaattn_hf.cli.main", "calibrate", str(directory), "--quiet",
        "--data", str(directory / "calibration.txt"), "--verify-data", str(directory / "heldout.txt"),
        "--budget", budget, "--lengths", str(length), "--dtype", "float32", "--device", "cpu",
        "--threads", str(threads), "--out", str(kept),
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    seconds = time.perf_counter() - start
    if not (kept / "adaattn_plan.json").is_file():
        raise RuntimeError(f"calibrate of {directory} ended with {done.returncode}: {done.stderr[-500:]}")
    return {
        "family": config.model_type,
        "shape": [config.num_attention_heads, config.num_key_value_heads, config.head_dim],
        "layers": config.num_hidden_layers,
        "window": config.sliding_window,
        "seconds": seconds,
        **proved(kept),
    }


def page(report: Mapping[str, Any]) -> str:
    """The page of a report."""
    parts = []
    for row in report["models"]:
        heads, kv_heads, dim = row["shape"]
        parts.append(
            f"## {row['family']}\n\n{row['layers']} layers, {heads} query heads and {kv_heads} key/value heads of "
            f"{dim}, five of six layers with a window of {row['window']}. The search decided after "
            f"{row['seconds']:.0f} s.\n\n" + of_budget(row)
        )
    made = report["provenance"]
    versions = made["versions"]
    return f"""# The search for a plan on other families

Written by `python -m studies.families_search`; do not edit. The models are small and were trained by
`python -m studies.families` on one text; calibration and proof read parts that no gradient has seen. Seconds are
the wall time of the whole command, loading included, on {report["threads"]} threads.

{chr(10).join(parts)}
Machine: {made["cpu"]}. Python {made["python"]}; torch {versions["torch"]}, transformers {versions["transformers"]}.
Commit {(made["commit"] or "not known")[:12]}.
"""


@app.command()
def main(
    directories: Annotated[list[Path], typer.Argument(help="Directories that `studies.families` made.")],
    budget: Annotated[str, typer.Option(help="Rise of the perplexity (0.1%) or nats/token.")] = "0.1%",
    length: Annotated[int, typer.Option(help="Tokens.")] = 2048,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 2,
    write: Annotated[Path | None, typer.Option(help="Directory of families.json and families.md.")] = None,
) -> None:
    """Calibrate each model, and write down how long it took and what was proved."""
    report = {
        "models": [searched(directory, budget, length, threads) for directory in directories],
        "threads": threads,
        "provenance": provenance(torch.device("cpu")),
    }
    if write is not None:
        write_atomically(write / "families.json", json_text(report, indent=1) + "\n")
        write_atomically(write / "families.md", page(report).encode())
    typer.echo(page(report))


if __name__ == "__main__":
    app()
