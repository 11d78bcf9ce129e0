"""How often a fixed sequence returns a plan beyond its budget: `python -m studies.fixed_order`, some minutes.

Everything that decides is the code that runs: the sequence of `calibrate`, its judgement, the bound, the gates. What a
model would say is drawn: sequences of a packaged model's losses on real text, drawn anew for each run, or losses of
heavy tails. `--measure` measures the model first.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.calibration import calibrate, proof
from adaattn_hf.calibration.inputs import Run, open_inputs
from adaattn_hf.calibration.layers import bound_layers, make_plan
from adaattn_hf.calibration.measure import measure
from adaattn_hf.calibration.passes import stock_distance
from adaattn_hf.calibration.proof import Evidence
from adaattn_hf.calibration.search import ladder
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.arms import plan_tap
from adaattn_hf.eval.demo import demo_model_path, pages_path
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.windows import TokenSequence
from adaattn_hf.patches.checkpoint import load
from adaattn_hf.plans.limits import Gates

from .pages import commit, machine, table

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SETTINGS = CalibrationSettings(budget=2e-2, lengths=(256,), held_out=1000, windows=(32, 64, 128), haystacks=0)
RUNS, LOST, FIRST = 10_000, 1.001, 0.5
"""Runs of each row, what a plan beyond its budget loses of it, and the safest one of a row of drawn losses."""
BOLDEST = "heavy tails, all bad, the boldest of all that pass"
Losses = NDArray[np.float64]
Draw = Callable[[np.random.Generator], Losses]
Row = tuple[str, float, float]
HEAD = """# A fixed sequence under the null

`python -m studies.fixed_order` repeats the verification of a calibration with losses of which the truth is known, and
counts how often the plan that it returns is beyond its budget. The sequence, the judgement and the bound are the
package's own. All candidates of a run read the same {count} sequences; the budget is such that the first bad candidate
loses {lost} times as much as is allowed. Limits beside that of the loss are left open: they can only refuse more.

* *Real text*: the candidates of the packaged LLaMA, on {all} sequences of {length} tokens that chose none of them. Each
  run draws its sequences from these, with replacement; the truth is the mean over all.
* *Heavy tails*: Student's t with five degrees of freedom, {of} candidates, all of them bad or rising from half of the
  budget; a part of the noise is common to the candidates of a run, as the text is.
* *The boldest of all that pass* is no sequence: it shows what looking for the best of all would do.

The level is 5 %; chance alone moves such a share of {runs:,} runs by {chance:.2%} (95 %). {machine}, commit {commit}.
"""


def measured() -> dict[str, Any]:
    """Returns the loss of each sequence and candidate, safe to bold, of the packaged LLaMA on its pages."""
    loaded = load(str(demo_model_path("llama")), device="cpu", implementation="adaattn")
    data = [pages_path("calibration")]
    held = [pages_path("heldout")]
    inputs = open_inputs(loaded.model, loaded.encode, data, SETTINGS, verify_data=held, run=Run())
    measurement = measure(inputs)
    (rounding, flips), length = stock_distance(inputs), SETTINGS.lengths[0]
    candidates, *_ = ladder(replace(measurement, rounding=rounding), {}, Gates(SETTINGS.budget), flips, [])
    losses = []
    for one in candidates:
        tap = plan_tap(bound_layers(measurement, make_plan(measurement, one.way.allocation.picks)))
        scores, _ = inputs.score(tap, inputs.samples[length]["held_out"], seed=1)
        losses.append([float(one.delta.mean()) for one in scores])
    return {"losses": losses, "length": length, "provenance": provenance(torch.device("cpu"))}


def returned(losses: Losses, budget: float, stops: bool = True) -> int:
    """Returns which candidate a verification returns, -1 for exact; `losses` `[candidates, sequences]`, nats/token.

    Without `stops` the boldest of all that pass.
    """
    tokens = SETTINGS.lengths[0] - 1
    read = [TokenSequence(str(at), ()) for at in range(losses.shape[1])]

    def evidence(_: Any, at: int, *__: Any) -> Evidence:
        return Evidence(read, (losses[at] * tokens).tolist(), [tokens] * len(read), np.zeros(1), tokens * len(read))

    def rung(at: int) -> Any:
        way = SimpleNamespace(cost=-at, stored="model", allocation=SimpleNamespace(picks=at))
        return SimpleNamespace(way=way, predicted={SETTINGS.lengths[0]: 0.0}, budget=None)

    scoring = SimpleNamespace(causal=True, generates=False)
    samples = {SETTINGS.lengths[0]: {"held_out": ()}}
    inputs = SimpleNamespace(
        settings=SETTINGS, run=Run(), scoring=scoring, samples=samples, other_source=False,
        refuse_late=lambda: None, score=lambda tap, *_: (tap, ()),
    )  # fmt: skip
    measurement: Any = SimpleNamespace(inputs=inputs, layers=SimpleNamespace(units=()))
    rungs = [tuple(map(rung, range(len(losses))))] if stops else [(rung(at),) for at in range(len(losses))]
    best, gates = -1, Gates(budget, rounding=1.0)
    with (
        mock.patch.object(proof, "make_plan", lambda _, picks: picks),
        mock.patch.object(proof, "bound_layers", lambda _, picks: {"at": picks}),
        mock.patch.object(proof, "activation", return_value=(1.0, 1.0)),
        mock.patch.object(proof, "stored_tap", lambda bound, stored: bound["at"]),
        mock.patch.object(proof.Evidence, "of", evidence),
    ):
        for candidates in rungs:
            with mock.patch.object(calibrate, "ladder", return_value=(candidates, gates, False)):
                _, passed, _ = calibrate.judged(measurement, 0.0, gates, (), [])
            best = best if passed is None else int(passed[0].way.allocation.picks)
    return best


def redrawn(losses: Losses, first: int, count: int) -> Draw:
    """Returns what draws the losses of a run from those of real text, in units of what candidate `first` breaks."""
    budget = losses[first].mean() / LOST
    return lambda random: np.asarray(losses[:, random.integers(losses.shape[1], size=count)] / budget)


def heavy(truth: Losses, count: int, common: float) -> Draw:
    """Returns what draws losses of heavy tails about the truth `[candidates]`, a share of whose variance is common."""

    def draw(random: np.random.Generator) -> Losses:
        own, shared = random.standard_t(5, (len(truth), count)), random.standard_t(5, count)
        return np.asarray(truth[:, None] + 0.5 * (np.sqrt(common) * shared + np.sqrt(1.0 - common) * own))

    return draw


def rows(losses: Losses, runs: int, count: int = 24) -> list[Row]:
    """Returns words, the share of runs that return a plan beyond the budget, and the share that return any.

    The last row is of no sequence.
    """
    many = len(losses)
    bad, rising = np.full(many, LOST), np.linspace(FIRST, 1.5, many)
    rising *= LOST / rising[many // 2]
    cases: list[tuple[str, Draw, int]] = [
        *(
            (f"real text, candidate {at + 1} is the first bad one", redrawn(losses, at, count), at)
            for at in range(many)
        ),
        *((f"heavy tails, all bad, {c:.0%} of the noise common", heavy(bad, count, c), 0) for c in (0.0, 0.5, 0.95)),
        ("heavy tails, rising", heavy(rising, count, 0.5), many // 2),
        (BOLDEST, heavy(bad, count, 0.0), 0),
    ]
    found = []
    for words, draw, first in cases:
        random = np.random.default_rng(0)
        best = np.array([returned(draw(random), 1.0, words != BOLDEST) for _ in range(runs)])
        found.append((words, float((best >= first).mean()), float((best >= 0).mean())))
    return found


def page(report: dict[str, Any], found: Sequence[Row], runs: int) -> str:
    """Returns the page of a measurement and of what its runs returned."""
    losses, made = report["losses"], report["provenance"]
    head = HEAD.format(count=24, lost=LOST, all=len(losses[0]), length=report["length"], of=len(losses),
                       runs=runs, chance=1.96 * np.sqrt(0.05 * 0.95 / runs), machine=machine(made),
                       commit=commit(made))  # fmt: skip
    lines = [[words, f"{runs:,}", f"{beyond:.2%}", f"{any_:.1%}"] for words, beyond, any_ in found]
    return "\n".join([head, *table(["losses", "runs", "beyond the budget", "any plan"], lines)[:-1]]) + "\n"


def main() -> None:
    """Measures where asked to, simulates, and writes the page."""
    file = RESULTS / "fixed_order.json"
    if "--measure" in sys.argv:
        write_atomically(file, json_text(measured(), indent=0, sort_keys=True) + "\n")
    report = json.loads(file.read_text(encoding="utf-8"))
    found = rows(np.array(report["losses"]), RUNS)
    write_atomically(file.with_suffix(".md"), page(report, found, RUNS))


if __name__ == "__main__":
    main()
