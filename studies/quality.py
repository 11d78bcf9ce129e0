"""Writes docs/results/quality.* from `adaattn eval`: `python -m studies.quality DIR`, of DIR/RUN/DATA/report.json."""

import json
import sys
from pathlib import Path

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.errors import UsageError

from .pages import commit, machine, table

TARGET = Path(__file__).parents[1] / "docs" / "results"
HEAD = """# Quality on whole test sets

SmolLM2-135M-Instruct, bfloat16, on all of WikiText-2 (test, raw) and LAMBADA, by `adaattn eval`. *exact* is without a
plan, *plan* is one of 0.1 % (`quality_plan.json`), calibrated at 8k tokens on a novel and WikiText's validation set and
verified on speeches. It is kept for its loss: on an H100 it makes the pass of one sequence 0.93 times as fast. Stock is
`sdpa`. Exact attention differs by how bfloat16 rounds. A run that is not in the table has not ended yet.
"""


def write(runs: Path, target: Path = TARGET) -> None:
    """Raises UsageError where a report has no commit."""
    reports = {
        f"{file.parts[-3]}, {file.parts[-2]}": json.loads(file.read_text()) for file in runs.glob("*/*/report.json")
    }
    rows = []
    for name, report in sorted(reports.items()):
        quality, made = report["quality"], report["provenance"]
        (stock, ours), (beside,) = quality["arms"], quality["comparisons"]
        if not made["commit"]:
            raise UsageError(f"{name}: the report has no commit; measure it again")
        delta, right = beside["delta_nll"], [f"{arm.get('accuracy', 0):.4f}" for arm in (stock, ours)]
        rows.append((name, f"{ours['tokens']:,}", f"{stock['word_perplexity']:.3f}", f"{ours['word_perplexity']:.3f}",
                     f"{delta['mean']:+.1e} ({delta['low']:+.1e} to {delta['high']:+.1e})", f"{delta['upper']:+.1e}",
                     " / ".join(right) if "accuracy" in ours else "–", f"{machine(made)}, {commit(made)}"))  # fmt: skip
    head = ("run", "tokens scored", "perplexity per word, stock", "ours", "Δnll, nats/token (95 %)", "upper bound",
            "accuracy, stock / ours", "measured on, commit")  # fmt: skip
    write_atomically(target / "quality.json", json_text(reports, indent=1, sort_keys=True) + "\n")
    write_atomically(target / "quality.md", "\n".join([HEAD, *table(head, rows)[:-1]]) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
