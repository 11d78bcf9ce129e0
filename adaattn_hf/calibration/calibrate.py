"""From a loss budget to a verified plan, in four steps.

* measure: estimate the risk of every choice for every unit (a key/value head of a layer) from a few backward passes on
  sampled rows (`measure`, `fisher`)
* price: time the launches of what the plan is for on this machine (`pricing`)
* choose: solve a multiple-choice knapsack within shares of the budget, from safe to bold, and measure each plan on
  calibration text (`search`, `policy.knapsack`)
* verify: judge these candidates in their order, all by the same held-out text and each at the full level, until one
  fails; the best that passed is the plan (`proof`)

The order is fixed before held-out text is read. So only the first candidate that breaks the budget can let a false one
through, and the error rate of all is that of one test: fixed-sequence testing (Maurer, Hothorn and Lehmacher 1995), in
the words of "Learn then Test" (Angelopoulos et al. 2021, arXiv 2110.01052) for limits on any loss.

All randomness comes from one seed, so that with prices from a file the plan is the same byte for byte. Prices measured
again differ in the last digits, which may decide between two choices of nearly equal price.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaattn_hf.patches.models.positions import longest_input
from adaattn_hf.patches.plans.attach import load_plan
from adaattn_hf.patches.plans.configured import name_of_model

from .._files import write_atomically
from ..plans import store
from ..plans.limits import MODEL, SOURCES, Gates, most_rounding, unproven
from ..plans.plan import Plan, UnitRecord, Verified
from ..plans.wording import allowed, at_most, counted, in_nats, rise
from ..policy.knapsack import Allocation, Array, evaluate, shared_prices, worst_length
from .inputs import OutOfTime
from .layers import Measurement, bound_layers, make_plan, picks_of, steps_stay_exact
from .passes import stock_distance, whole_passes
from .proof import Proof, prove, worst
from .search import PROTOCOL, Candidate, Losses, Way, falling, ladder, roundings, storages
from .settings import Calibration, CalibrationSettings

APART = 0.1
"""The distance of two stock implementations is said if it is more than this share of the budget."""


def decided(measurement: Measurement, budget: float | None = None, proven: Sequence[Plan] = ()) -> Calibration:
    """Returns the plan of a budget in nats/token, that of the settings if absent, and times whole passes of it.

    Each budget has the error rate of its settings, and k of them are all kept with at least 1 - k alpha. Plans that
    were `proven` before come first where they were proven on the same text.
    """
    inputs = measurement.inputs
    result = choose_and_verify(measurement, replace(inputs.settings, budget=budget or inputs.settings.budget), proven)
    if result.met and inputs.settings.rounds and inputs.team.is_main:
        timed = result.report["whole_forward"] = list[dict[str, Any]]()
        try:
            for one in whole_passes(inputs, bound_layers(measurement, result.plan)):
                timed.append(asdict(one))
        except OutOfTime as over:  # the plan is verified, and stays, with what was timed of it
            inputs.run.say(f"further whole passes are not timed: {over}")
        except torch.OutOfMemoryError:
            inputs.run.say(f"further passes of {inputs.settings.batch} sequences have no room: lower --batch-size")
    return result


def choose_and_verify(
    measurement: Measurement, settings: CalibrationSettings | None = None, proven: Sequence[Plan] = ()
) -> Calibration:
    """Returns the best plan that passed verification, with the format of its cache, or the exact one with the reason.

    `settings` may have another budget or verification than those of the measurement.
    """
    if settings is not None:
        measurement = replace(measurement, inputs=measurement.inputs.with_settings(settings))
    s, dtype = measurement.inputs.settings, measurement.layers.exact.dtype
    rounding, flips = stock_distance(measurement.inputs)
    measurement = replace(measurement, rounding=rounding)
    gates = Gates(s.budget, s.top1, s.needles_lost, min(rounding, most_rounding(dtype)), max_kl=s.max_kl)
    if rounding > APART * s.budget:
        measurement.inputs.run.say(
            f"two stock implementations differ by a KL of {in_nats(rounding)} nats/token in this dtype, which is not "
            "held against a plan"
        )
    log: list[dict[str, Any]] = []
    gates, passed, reason = judged(measurement, flips, gates, proven, log)
    if passed is None:
        zero, one = np.zeros(len(measurement.layers.units), dtype=np.int64), np.ones(len(s.lengths))
        sentence = f"the budget of {allowed(gates.budget)} cannot be met: {reason}; the plan is exact"
        noted = report(measurement, log, None, one, [step["verified"] for step in log if "verified" in step])
        return Calibration(finished_plan(measurement, zero, None, one, gates), False, sentence, noted)
    candidate, proof = passed
    allocation, storage = candidate.way.allocation, candidate.way.storage
    verdict = worst(proof.alone.values()) if proof.alone else None
    plan = finished_plan(measurement, allocation.picks, verdict, candidate.alpha, gates)
    noted = report(measurement, log, allocation, candidate.alpha, [asdict(one) for one in proof.verdicts])
    sentence = proof.worst.sentence
    if storage is not None:
        coded = worst(proof.coded.values()) if proof.coded else None
        stored = {**asdict(storage), "verified": None if coded is None else asdict(coded)}
        plan = replace(plan, protocol={**plan.protocol, PROTOCOL: stored})
        words = ", as exact as the plan" if coded is None else f" {coded.sentence}"
        noted[PROTOCOL] = f"cache: {storage.words}{words}"
        sentence = f"{sentence}; {noted[PROTOCOL]}"
    return Calibration(plan, True, sentence, noted)


def judged(
    measurement: Measurement, flips: float, gates: Gates, proven: Sequence[Plan], log: list[dict[str, Any]]
) -> tuple[Gates, tuple[Candidate, Proof] | None, str]:
    """Returns the limits, the best candidate that held-out text proved, and in words why it proved no other.

    Plans that were `proven` on this text before come first, bolder ones after them; what was found joins the `log`.
    `flips` is the share of likeliest tokens in which two stock implementations differ.
    """
    passed, reason = list[tuple[Candidate, Proof]](), ""
    inputs, s = measurement.inputs, measurement.inputs.settings
    try:
        formats = roundings(measurement) if s.with_cache else {}
        candidates, gates, forgetful = ladder(measurement, formats, gates, flips, log)
        order = falling([*proven_candidates(measurement, proven, formats), *candidates])
        if not order:
            reason = _nothing(measurement, forgetful, [step for step in log if "cost" in step])
        for number, candidate in enumerate(order, 1):
            proof = prove(measurement, candidate.way, candidate.predicted, gates, number)
            log.append({"verified": asdict(proof.worst), "candidate": number, "of": len(order)})
            figures = f"perplexity {rise(proof.worst.delta_nll)}, at most {at_most(proof.worst.upper)}: passed"
            outcome = figures if proof.passed else proof.worst.sentence
            # In full, the order has two hypotheses of a candidate: that its plan keeps the limits, and behind it that
            # it does over its cache's format. Each is tested once, at the full level, until one fails. With 1 - alpha
            # all that passed are true at once, so that the best of them may be taken, whatever the next one showed:
            # of a candidate whose format failed that is the plan alone.
            if not proof.passed and proof.alone and proof.coded:
                alone = storages(measurement, candidate.way.allocation.picks)["model"]
                if alone.streaming and alone.share <= (s.kv_bytes or 1.0):
                    outcome += f" over {candidate.way.stored}; its plan passed without that, {alone.words}"
                    way = replace(candidate.way, storage=alone, beside=None)
                    passed.append((replace(candidate, way=way), Proof(proof.alone, {}, proof.loss)))
            before = "" if candidate.budget is None else f", proven for {allowed(candidate.budget)}"
            inputs.run.say(f"candidate {number} of {len(order)}{before}: {outcome}")
            if not proof.passed:
                reason = f"the first candidate {proof.worst.sentence}; {proof.remedy(gates)}"
                break
            passed.append((candidate, proof))
    except OutOfTime as over:
        reason = str(over)
    return gates, min(passed, key=lambda one: one[0].way.cost, default=None), reason


def proven_candidates(measurement: Measurement, proven: Sequence[Plan], formats: Losses) -> list[Candidate]:
    """Returns the candidates of plans that were proven on this held-out text for a smaller budget, smallest first.

    Theirs are these weights, lengths and text, and choices that are priced here.
    """
    layers, candidates = measurement.layers, list[Candidate]()
    inputs, s = measurement.inputs, measurement.inputs.settings
    for plan in sorted(proven, key=lambda one: one.budget):
        drawn = {"seed": plan.seed, **plan.protocol.get("settings", {})}
        same = (
            (plan.weight_hash, plan.dtype, plan.lengths, plan.data_fingerprint)
            == (layers.exact.weight_hash, layers.exact.dtype, s.lengths, inputs.fingerprint)
            and all(drawn.get(name) == getattr(s, name) for name in ("seed", "sequences", "joint"))
            and (plan.cache is not None) == s.with_cache
            and {choice for layer in plan.layers for choice in layer.choices} <= {*layers.candidates.choices}
        )
        if not same or plan.budget >= s.budget or unproven(plan) is not None:
            continue
        picks = picks_of(measurement, plan)
        way = Way(evaluate(picks, measurement.prices, measurement.risks(), measurement.launches))
        if plan.cache is not None:
            stored = plan.cache[0]
            way = replace(way, storage=storages(measurement, picks)[stored], beside=formats.get(stored, {}))
        if s.kv_bytes is None or way.cost <= s.kv_bytes:
            candidates.append(Candidate.measured(measurement, way, np.ones(len(plan.lengths)), plan.budget))
    return candidates


def _nothing(measurement: Measurement, forgetful: bool, tried: Sequence[dict[str, Any]]) -> str:
    """Says why there is no candidate, of those that were `tried` on calibration text, and what would change it."""
    s, positions = measurement.inputs.settings, longest_input(measurement.inputs.arms.model)
    if forgetful:
        return "no candidate saves and keeps the needles in the calibration text; --needles allows more to be lost"
    if s.kv_bytes is not None:
        costs = [step["cost"] for step in tried]
        least = f"the smallest that is foretold within it takes {min(costs):.2f}x" if costs else "none is smaller"
        return (
            f"kv_bytes: {s.kv_bytes:g}x of the bytes is not reached by any format with windows, {least}; ask for that, "
            "for a larger budget, or for longer --lengths"
        )
    if tried:
        return "all that save are beyond the limits in the calibration text; a larger budget would change that"
    longer = [f"longer --lengths (now {s.lengths[-1]})"] * (positions is None or s.lengths[-1] < positions)
    rows = [f"more rows (--batch-size, now {s.batch})"] * (s.aim == "step")
    of = f" in a step of {counted(s.batch, 'row')}" if s.aim == "step" else ""
    would = " or ".join([*longer, *rows, "a larger budget"])
    saved = "memory" if s.with_cache else "time"
    return f"no candidate within the budget saves {saved}{of} on this machine; {would} would change that"


def finished_plan(
    measurement: Measurement, picks: NDArray[np.int64], verified: Verified | None, alpha: Array, gates: Gates
) -> Plan:
    """Returns the plan of an allocation with its proof, the protocol of its calibration, records and tensors.

    Sums of risks are re-scaled by `alpha` `[lengths]`.
    """
    plan = make_plan(measurement, picks)
    tensors = {
        f"layers.{layer.layer}.{name}": tensor.cpu().contiguous()
        for layer in plan.layers
        for head, choice in enumerate(layer.choices)
        for part in choice.parts
        for name, tensor in part.tensors(measurement.layers.tensors[layer.layer], head).items()
    }
    risk = worst_length(measurement.risks(alpha), picks)
    price, exact_price = (
        shared_prices(one, measurement.prices, measurement.launches) for one in (picks, np.zeros_like(picks))
    )
    dropped = np.asarray(sum(measurement.state.dropped.values()) / sum(measurement.state.done.values()))
    planned = {layer.layer for layer in plan.layers}
    units = tuple(
        UnitRecord(
            *unit, float(risk[at]), float(price[at]), float(exact_price[at]), *map(float, dropped[at, picks[at]])
        )
        for at, unit in enumerate(measurement.layers.units)
        if unit[0] in planned
    )
    # what the plan says elsewhere, and `rounds`, which changes nothing in it
    named = ("budget", "seed", "lengths", "rounds")
    protocol: dict[str, Any] = {
        MODEL: name_of_model(measurement.inputs.arms.model),
        "scoring": measurement.inputs.scoring.words(),
        "settings": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(measurement.inputs.settings).items()
            if name not in named
        },
        "alpha": alpha.tolist(),
        "gates": asdict(gates),
        "prices": hashlib.sha256(measurement.table.to_json().encode()).hexdigest(),
        "machine": measurement.table.machine,
        SOURCES: measurement.inputs.sources,
        "clusters": "documents where they count for eight of one size, stretches of text otherwise",
    }
    s = measurement.inputs.settings
    prompts = s.aim == "prompt" and measurement.inputs.scoring.generates and picks.any()
    if prompts and steps_stay_exact(measurement.table, measurement.layers, s.lengths, picks):
        protocol["decode"] = "exact"
    return replace(plan, protocol=protocol, units=units, verified=verified, tensors=store.remember_tensors(tensors))


def report(
    measurement: Measurement,
    history: list[dict[str, Any]],
    allocation: Allocation | None,
    alpha: Array,
    verdicts: list[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the report of a calibration for `json_text`, which writes its infinite numbers as null.

    `allocation` is None for the exact plan, `history` is what each step predicted and measured, `verdicts` holds the
    last one of each length.
    """
    exact = np.zeros(len(measurement.layers.units), dtype=np.int64)
    base, price = (
        evaluate(picks, measurement.prices, measurement.risks(), measurement.launches).price
        for picks in (exact, exact if allocation is None else allocation.picks)
    )
    return {
        "prices": measurement.table.to_json(),
        "rounding": measurement.rounding,  # every measured KL holds it
        "history": history,
        "alpha": alpha.tolist(),
        "verdicts": verdicts,
        "price_exact_seconds": base,
        "price_plan_seconds": price,
        "risk": allocation.risk.tolist() if allocation is not None else [],
        "table": measurement.solver(alpha).to_dict(),
    }


def save_plan(model: Any, result: Calibration, directory: Path) -> None:
    """Writes the plan beside a model's weights: to `config.json`, and its bases and means to a safetensors file.

    Every file is the old one or the new one, whatever happens.
    """
    load_plan(model, result.plan)
    data = result.plan.tensor_bytes()
    if data is not None:
        write_atomically(directory / store.TENSORS_FILE, data)
    # written in place, a full disk would leave half a configuration of the model
    with tempfile.TemporaryDirectory() as apart:
        model.config.save_pretrained(apart)
        for file in Path(apart).iterdir():
            data = file.read_bytes()
            if file.name == "config.json" and (directory / file.name).is_file():
                # the dtype is that of the checkpoint, in whatever dtype the model was calibrated
                old, names = json.loads((directory / file.name).read_bytes()), ("dtype", "torch_dtype")
                new = {name: value for name, value in json.loads(data).items() if name not in names}
                kept = {name: old[name] for name in names if name in old}
                data = (json.dumps({**new, **kept}, indent=2, sort_keys=True) + "\n").encode()
            write_atomically(directory / file.name, data)
    write_atomically(directory / store.PLAN_FILE, result.plan.to_json())
