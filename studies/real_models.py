"""Plans for larger models: `python -m studies.real_models MODEL OUT --texts TEXTS`, then `--speed`, then `--write`.

TEXTS holds `calibration/`, `proof/` and `third/`, whose files are sources; the third kind decides nothing. MODEL is a
directory, or a shape of random weights (`8b`), which have no losses. A model, a length, a budget and a seed make a row,
a file under OUT and the name of the device; a row that is there is not measured again, so that an interrupted study
goes on, on the same type of card, and processes share it. `--speed` times what the host takes part in, in one sitting.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaattn_cli.job import read_budget
from adaattn_cli.options import tokens
from adaattn_hf import prepare, restore, use_plan
from adaattn_hf._files import json_text, write_atomically
from adaattn_hf.calibration.calibrate import choose_and_verify, save_plan
from adaattn_hf.calibration.inputs import Run, open_inputs
from adaattn_hf.calibration.layers import Measurement, bound_layers, picks_of
from adaattn_hf.calibration.measure import forecast, measure
from adaattn_hf.calibration.proof import Evidence
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.eval.arms import plan_tap
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.timing import spread, turn
from adaattn_hf.eval.windows import TokenSequence, draw
from adaattn_hf.patches.checkpoint import load, resolve_device
from adaattn_hf.patches.plans.attach import remove_plan
from adaattn_hf.patches.plans.bound import BoundPlan
from adaattn_hf.plans.plan import Plan
from adaattn_hf.plans.store import PLAN_FILE
from adaattn_hf.policy.prices import PriceTable
from adaattn_hf.stats.stopwatch import timed

from .budget import attention_seconds, fewer_pairs, ratio, scores
from .cache_arms import SHAPES, shaped
from .real_page import write_page

KINDS = ("calibration", "proof", "third")
LONG = 16_384
"""Beyond so many tokens half as many sequences of the third kind are read."""
Encode = Callable[[str], Sequence[int]]
Figures = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Study:
    """A model, `attn_implementation="adaattn"`, and what is measured on it.

    Attributes:
        name, model, encode: The model, and text to token ids.
        sources: Texts by kind.
        place: Directory of the rows of this device.
        random: Whether the weights are, and losses mean nothing.
        third: Sequences of the third kind.
        prices: Those of another machine, which the plans are for: an `adaattn_prices.json`.
    """

    name: str
    model: Any
    encode: Encode
    sources: Mapping[str, Sequence[Path]]
    place: Path
    random: bool
    third: int
    prices: PriceTable | None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        found: torch.device = self.model.device
        return found

    def file(self, room: str, length: int, *more: object) -> Path:
        """A row's file, or one of speed."""
        return (
            self.place / room / ("-".join([self.name, str(length), *(str(one).rstrip("%") for one in more)]) + ".json")
        )

    def drawn(self, length: int, count: int, seed: int) -> list[TokenSequence]:
        """Sequences of the third kind."""
        return draw(self.sources["third"], self.encode, length, {"third": count}, seed)[0]["third"]


def opened(
    model: str, texts: Path, out: Path, device: str | None, third: int = 24, prices: PriceTable | None = None
) -> Study:
    """Returns the study of a model in bfloat16, whose pieces of text are encoded once for all seeds and lengths."""
    where, random = resolve_device(device), model in SHAPES
    if random:
        found = shaped(model, where)
        found.set_attn_implementation("adaattn")
        most = found.config.vocab_size
        encode: Encode = lambda text: [byte % most for byte in text.encode()]  # noqa: E731
    else:
        loaded = load(model, dtype="bfloat16", device="cpu", implementation="adaattn")
        found, encode = loaded.model.to(where), cache(lambda text: tuple(loaded.encode(text)))
    sources = {kind: sorted((texts / kind).iterdir()) for kind in KINDS}
    card = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    return Study(Path(model).name, found, encode, sources, out / card.replace(" ", "-"), random, third, prices)


def rows_of(study: Study, length: int, budgets: Sequence[str], seed: int, **more: Any) -> list[Path]:
    """Measures the rows of a length and a seed that are not there, risks and prices once; returns all their files.

    Budgets are rises of the perplexity, such as `1%`; `more` are settings of the calibration beside its defaults.
    """
    files = {budget: study.file("rows", length, budget, seed) for budget in budgets}
    missing = [budget for budget, file in files.items() if not file.is_file()]
    if not missing:
        return list(files.values())
    # decode steps are priced as they are captured
    words = {"captured": study.device.type == "cuda"} | more
    words |= {"lengths": (length,), "seed": seed}
    wanted = {budget: CalibrationSettings(budget=read_budget(budget)[1], **words) for budget in missing}
    remove_plan(study.model)
    inputs = open_inputs(
        study.model, study.encode, study.sources["calibration"], wanted[missing[0]],
        verify_data=study.sources["proof"], run=Run(say=partial(print, flush=True)),
    )  # fmt: skip
    peak, started = _peak(study.device), time.perf_counter()
    measurement = measure(inputs, prices=study.prices)
    measuring, highest = time.perf_counter() - started, peak()
    proven: list[Plan] = []
    for budget in sorted(missing, key=lambda budget: wanted[budget].budget):
        peak, started = _peak(study.device), time.perf_counter()
        result = choose_and_verify(measurement, wanted[budget], proven)
        proven += [result.plan] * result.met
        record = {
            "model": study.name, "length": length, "budget": budget, "nats": wanted[budget].budget, "seed": seed,
            "random": study.random, "met": result.met, "sentence": result.sentence,
            "verdict": result.report["verdicts"][-1] if result.met else None,
            "seconds": measuring + time.perf_counter() - started, "measuring": measuring,
            "peak_gb": max(highest, peak()), "predicted_gb": forecast(inputs, measurement.layers)[1] / 1e9,
            "sources": {kind: [path.name for path in paths] for kind, paths in study.sources.items()},
            "priced": measurement.table.machine, "provenance": provenance(study.device),
        }  # fmt: skip
        record |= _found(study, measurement, result.plan, seed)
        if result.met:
            kept = study.file("plans", length, budget, seed).with_suffix("")
            kept.mkdir(parents=True, exist_ok=True)
            save_plan(study.model, result, kept)
            remove_plan(study.model)
        _write(files[budget], record)
        print(
            f"{files[budget].stem}: {record['seconds']:.0f} s, {record['peak_gb']:.1f} GB, {result.sentence}",
            flush=True,
        )
    return list(files.values())


def _write(file: Path, record: Mapping[str, Any]) -> None:
    write_atomically(file, json_text(record, indent=1, sort_keys=True) + "\n")


def _found(study: Study, measurement: Measurement, plan: Plan, seed: int) -> dict[str, Any]:
    """What a plan reads and saves, and loses on the third kind of text."""
    length, picks = plan.max_length, picks_of(measurement, plan)
    labels = [measurement.layers.candidates.choices[pick].label for pick in picks]
    found = {"fewer_pairs": fewer_pairs(labels, length), "by_prices": ratio(measurement, picks, length)}
    if study.random:
        return found
    third = study.third if length <= LONG else max(study.third // 2, 2)
    tap = plan_tap(bound_layers(measurement, plan))
    drawn = study.drawn(length, third, seed)
    evidence = Evidence.of(drawn, measurement.inputs.score(tap, drawn, seed=0)[0])
    return {**found, "picks": labels, "third": {**scores(evidence), "sequences": third}}


def _peak(device: torch.device) -> Callable[[], float]:
    """Returns what tells the most that is held from now on, in GB; on a CPU what the process has ever held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device) / 1e9
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def speed_of(study: Study, length: int, names: Sequence[str]) -> Path:
    """Times passes and attention of a model under all plans of a length, anew where a plan was missing.

    A plan's name is its budget and seed, `1% 0`.
    """
    file = study.file("speed", length)
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    places = {name: study.file("plans", length, *name.split()).with_suffix("") for name in names}
    plans = {name: Plan.from_pretrained(place) for name, place in places.items() if (place / PLAN_FILE).is_file()}
    text = study.drawn(length, 1, 0)[0].tokens
    ids = torch.tensor([text], device=study.device)
    works: dict[str, tuple[Mapping[str, Plan], Callable[..., Any]]] = {
        "passes": (plans, partial(passes, study.model, ids))
    }
    if study.device.type == "cuda":
        works["attention"] = plans, partial(attention, study.model, ids)
    for name, (under, work) in works.items():
        if name not in kept or not under.keys() <= kept[name].keys():
            kept |= {"model": study.name, "length": length, "provenance": provenance(study.device), name: work(under)}
            _write(file, kept)
            print(f"{file.stem}, {name}: {json.dumps(kept[name])}", flush=True)
    return file


@torch.no_grad()
def passes(model: Any, ids: Tensor, plans: Mapping[str, Plan], rounds: int = 5) -> Figures:
    """Seconds of prefills of one sequence with a cache, to the last logits; the arms take turns."""
    device, found, prepared = ids.device, dict[str, list[float]](), {} if ids.is_cuda else {"prepared": None}
    arms: dict[str, Plan | None] = {"stock": None, "exact": None, **prepared, **plans}
    call = partial(model, input_ids=ids, logits_to_keep=1)
    for number in range(-1, rounds if ids.is_cuda else 3):
        for place in turn(len(arms), max(number, 0)):
            name, plan = list(arms.items())[place]
            model.set_attn_implementation("sdpa" if name == "stock" else "adaattn")
            if name == "prepared":
                prepare(model)
            with nullcontext() if name == "stock" else use_plan(model, plan):
                if ids.is_cuda:
                    call()  # makes what later passes of this plan share
                seconds = timed(call, device)[1].wall
            restore(model)
            if number >= 0:
                found.setdefault(name, []).append(seconds)
    return {name: spread(seconds) for name, seconds in found.items()}


def attention(model: Any, ids: Tensor, plans: Mapping[str, Plan]) -> dict[str, float]:
    """The device's seconds of all attention calls of a prefill, by arm."""
    model.set_attn_implementation("adaattn")
    arms = {name: BoundPlan.of(model, plan).by_index for name, plan in plans.items()}
    return attention_seconds(partial(model.base_model, input_ids=ids, use_cache=False), arms)


def main() -> None:
    """Measures rows, or speed, or writes the page."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("model", help=f"directory of a causal LM, or one of {', '.join(SHAPES)}; with --write OUT alone")
    words.add_argument("out", type=Path, nargs="?", help="directory of the study")
    words.add_argument("--texts", type=Path, help=f"directory of {', '.join(KINDS)}")
    words.add_argument("--lengths", type=tokens, default="8k", help="in tokens, by commas")
    words.add_argument("--budgets", default="0.1%,1%", help="rises of the perplexity, by commas")
    words.add_argument("--seeds", default="0,1,2", help="by commas")
    words.add_argument("--third", type=int, default=24, help=f"sequences of the third kind; half of it beyond {LONG}")
    words.add_argument("--prices", type=Path, help="prices of the machine that plans are for; measured here if absent")
    words.add_argument("--settings", type=json.loads, default={}, help="JSON: of the calibration, for a trial")
    words.add_argument("--speed", action="store_true", help="time passes under the plans that are there")
    words.add_argument("--device", help="cpu, cuda, cuda:1")
    words.add_argument("--write", type=Path, help="write the page of OUT into this directory")
    asked = words.parse_args()
    if asked.write:
        return write_page(Path(asked.model), asked.write)
    if asked.out is None or asked.texts is None:
        words.error("expected MODEL OUT --texts DIRECTORY")
    prices = None if asked.prices is None else PriceTable.from_json(asked.prices.read_text(encoding="utf-8"))
    study = opened(asked.model, asked.texts, asked.out, asked.device, asked.third, prices)
    budgets, seeds = asked.budgets.split(","), [int(seed) for seed in asked.seeds.split(",")]
    for length in asked.lengths:
        if asked.speed:
            names = [f"{budget} {seed}" for seed in seeds for budget in budgets]
            speed_of(study, length, names)
        for seed in () if asked.speed else seeds:
            rows_of(study, length, budgets, seed, **asked.settings)
    return None


if __name__ == "__main__":
    main()
