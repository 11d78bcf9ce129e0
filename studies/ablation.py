"""What the families of choices, the risks of heads and the joint search add: `python -m studies.ablation WORK [MODEL]`.

The packaged models are calibrated once for risks and prices. Each arm calibrates again with both, under one family, or
with risks that do not tell heads apart, and is verified like any plan. What WORK holds already is not run again.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaattn_cli.calibrate import run
from adaattn_cli.commands import CALIBRATE
from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.calibration.state import RISKS_FILE
from adaattn_hf.eval.demo import DEMO_MODELS, demo_model_path, pages_path
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.plans.wording import at_most, rise, times
from adaattn_hf.policy.candidates import known_families

from .pages import commit, machine, table

TARGET = Path(__file__).parents[1] / "docs" / "results"
ALL, FLAT = "all", "all, risks averaged over heads"
BUDGETS = "1%", "0.1%"
KEPT = "history", "price_exact_seconds", "price_plan_seconds"
HEAD = """# What each part of a calibration contributes

Written by `python -m studies.ablation`; do not edit. All arms of a model share the same risks and prices. Each is a
search under one kind of choice (`--families`), under all, or under all with risks averaged over heads: it then knows
what a choice costs, but not where. At a commit marked `+dirty` files differed from it.

* *times as fast*: attention of a prefill, by the prices. They were taken once for each model, on a machine that was not
  quiet: compare arms of one model with one another, and believe no speed.
* *measured / predicted*: of the first candidate, which the sum of risks alone chose, the KL on calibration text over
  the predicted. The joint search corrects what is not 1.
* *candidates*: how many plans the joint search measured.

The packaged models are tiny: their figures show how the parts work together, not what a large model gains.
"""


def averaged(base: Path, target: Path) -> Path:
    """Writes a plan's risks to another directory, each choice's averaged over all heads; returns that directory."""
    with np.load(base / RISKS_FILE) as file:
        arrays = {name: file[name] for name in file.files}
    for name, part in arrays.items():
        if name.startswith(("total.", "needles.")):
            arrays[name] = np.broadcast_to(part.mean(0), part.shape)
    target.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target / RISKS_FILE, **arrays)  # type: ignore[arg-type]
    return target


def measure(base: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Returns the result of each arm at each budget; those that `work` lacks are calibrated and kept there."""
    first = work / f"{ALL}, {BUDGETS[0]}"
    found: dict[str, Any] = {}
    for arm, budget in product((ALL, *known_families(), FLAT), BUDGETS):
        place = work / f"{arm}, {budget}"
        kept = work / f"{place.name}.json"
        if not kept.is_file():
            words = {**base, "budget": (budget,), "output_dir": place, "resume": place.is_dir()}
            if place != first:
                risks = averaged(first, work / "averaged") if arm == FLAT else first
                words |= {"risks": risks, "prices": first / "adaattn_prices.json"}
            done = run(CALIBRATE(**words, families=() if arm in (ALL, FLAT) else (arm,)))
            report, plan = done.result["report"], done.result["plan"]
            result = {"verified": None if done.code else plan["verified"], **{name: report[name] for name in KEPT}}
            write_atomically(kept, json_text({**result, "provenance": provenance(torch.device("cpu"))}, indent=1))
        found[place.name] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def row_of(name: str, found: Mapping[str, Any]) -> Sequence[str]:
    """Returns a row of the table."""
    proof, history = found["verified"], found["history"]
    faster = times(found["price_exact_seconds"] / found["price_plan_seconds"])
    shown = (f"{rise(proof['delta_nll'])}, {at_most(proof['upper'])}", faster) if proof else ("no plan", "1.00")
    measured = [step for step in history if "measured" in step]  # the other steps judge candidates on held-out text
    over = times(max(np.divide(measured[0]["measured"], measured[0]["predicted"]))) if measured else "–"
    return (name, *shown, over, str(len(measured)))


def page(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page of all models."""
    head = ("arm", "perplexity, at most", "times as fast", "measured / predicted", "candidates")
    lines = [HEAD]
    for name, arms in models.items():
        made = [arm["provenance"] for arm in arms.values()]
        lines += [f"## {name}", "", f"{machine(made[0])}, commit {', '.join(dict.fromkeys(map(commit, made)))}.", ""]
        lines += table(head, [row_of(arm, found) for arm, found in arms.items()])
    missing = [name for name in DEMO_MODELS if name not in models]
    lines += [f"Not measured yet: {', '.join(missing)}.", ""] if missing else []
    return "\n".join(lines[:-1]) + "\n"


def main(work: Path, names: Sequence[str], target: Path = TARGET) -> None:
    """Measures what is missing of some models, and writes the page anew as soon as one is done."""
    pages = {name: (pages_path(split),) for name, split in (("data", "calibration"), ("verify_data", "heldout"))}
    base = {"device": "cpu", "threads": 1, "quiet": True, "as_json": True, **pages}
    kept = target / "ablation.json"
    models = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    for name in names:
        models[name] = measure({**base, "model": str(demo_model_path(name))}, work / name)
        write_atomically(kept, json_text(models, indent=1) + "\n")
        write_atomically(target / "ablation.md", page(models))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("models", nargs="*", default=DEMO_MODELS)
    given = parser.parse_args()
    main(given.work, given.models)
