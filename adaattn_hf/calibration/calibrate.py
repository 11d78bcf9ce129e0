"""From a loss budget to a verified plan: measure risks and prices, choose, verify on held-out text, back off.

    measure   risk of every (layer, key/value head, choice) from a few backward passes on sampled rows   ->
    fisher price     the launches, timed on this machine
    -> pricing choose    a multiple-choice knapsack inside the budget of every length
    -> policy.knapsack re-scale  the sum of risks by one measured joint KL, and choose again verify
    held-out text, paired and clustered, with gates; on failure spend less on fresh text      -> verify

Everything random comes from one seed; with the prices of a file the plan is the same byte for byte. Prices
timed anew differ in the last digits, and may tip a choice between two of nearly the same price.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf import attach
from adaattn_hf.approximate import LayerTensors, Program
from adaattn_hf.calibration import needles, verify
from adaattn_hf.calibration.arms import Progress, compare, plan_tap, programs_of, silent
from adaattn_hf.calibration.measure import Measurements
from adaattn_hf.calibration.settings import Calibration, CalibrationSettings
from adaattn_hf.calibration.state import CalibrationState
from adaattn_hf.files import write_atomically
from adaattn_hf.plan import PLAN_FORMAT, TENSORS_FILE, Choice, LayerPlan, Plan, UnitRecord, Verified
from adaattn_hf.policy.acceptance import Gates
from adaattn_hf.policy.backoff import Backoff, adjusted_alpha
from adaattn_hf.policy.knapsack import Allocation, Array, allocate, evaluate, shared_prices
from adaattn_hf.policy.prices import PriceTable
from adaattn_hf.policy.risk import rescale

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "Run",
    "ablation_rows",
    "calibrate",
    "prepare_run",
    "save_plan",
]

JOINT_STEPS = 4
"""Plans measured at most before one is verified."""


def calibrate(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    *,
    verify_data: Sequence[str | Path] | None = None,
    prices: PriceTable | None = None,
    directory: Path | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> Calibration:
    """Returns a plan for a model, verified on held-out text.

    Args:
        model: A model loaded with `attn_implementation="adaattn"`, on the device and in the dtype it will run
            in.
        encode: Text to token ids, without special tokens.
        data: Files and directories of text.
        settings: How the plan is made.
        verify_data: Held-out text of another source; disjoint parts of `data` when absent.
        prices: Prices measured before; measured now when absent.
        directory: Where the state is kept after every sequence.
        resume: Go on with the state found there.
        progress: Told what is being done.

    Raises:
        ValueError: If the model cannot carry a plan, or the text is too short.
    """
    run = Run(model, encode, list(data), settings, list(verify_data) if verify_data else None, progress)
    run.measure(directory, resume)
    run.price(prices)
    result = run.choose_and_verify()
    if directory is not None and run.team.leads:
        CalibrationState.forget(directory)
    return result


class Run(Measurements):
    """One calibration: measured, then chosen and verified."""

    def solve(
        self, budget: Array, demoted: Sequence[int] = (), allowed: Callable[[Choice], bool] | None = None
    ) -> Allocation:
        """Returns the cheapest allocation inside a budget per length, some units exact, of allowed choices alone."""
        risks = self.risks()
        for place, choice in enumerate(self.candidates.choices):
            if place and allowed is not None and not allowed(choice):
                risks[:, :, place] = np.inf
        for unit in demoted:
            risks[:, unit, 1:] = np.inf
        return allocate(self.prices, risks, budget, self.launches)

    def measured(self, picks: NDArray[np.int64], length: int) -> dict[str, float]:
        """Returns what held-out text of a length says about an allocation, and its price ratio there."""
        held = self.samples[length][0]["try 1"]
        states = self.held_states.setdefault(length, {})
        evidence = verify.gather(self.arms, self.programs(picks), held, states=states)
        bound = evidence.bound(0.95)
        return {
            "delta_nll": bound.mean,
            "upper": bound.upper,
            "kl": float(torch.cat(evidence.kl).mean()),
            "top1": evidence.agree / bound.tokens,
            "ratio": self.ratio(picks, length),
        }

    def evaluate(self, picks: NDArray[np.int64]) -> dict[str, float]:
        """Returns predicted and measured loss and the price ratio of an allocation at the longest length."""
        units = np.arange(len(self.units))
        risk = float(self.risks()[-1, units, picks].sum())
        return {"predicted": risk, **self.measured(picks, self.settings.lengths[-1])}

    def uniform(self, choice: Choice) -> dict[str, float]:
        """Returns the same for one choice on every unit."""
        return self.evaluate(np.full(len(self.units), self.candidates.choices.index(choice)))

    def programs(self, picks: NDArray[np.int64]) -> dict[int, Program]:
        """Returns the programs of an allocation."""
        return programs_of(self.make_plan(picks, None, self.settings.lengths), self.tensors)

    def picks(self, plan: Plan) -> NDArray[np.int64]:
        """Returns the place among the candidates of each unit's choice in a plan."""
        exact = (self.candidates.choices[0],) * self.kv_heads
        layers = {layer.layer: layer.choices for layer in plan.layers}
        chosen = [choice for index in self.layers for choice in layers.get(index, exact)]
        return np.array([self.candidates.choices.index(choice) for choice in chosen], dtype=np.int64)

    def joint(self, picks: NDArray[np.int64], length: int) -> tuple[float, float]:
        """Returns the measured KL of an allocation on the sequences set aside for it, and its flips per token."""
        tap = plan_tap(self.programs(picks))
        sequences = self.samples[length][0]["joint"]
        parts = [self._tokens(sequences[number]) for number in self.team.mine(len(sequences))]
        if length not in self.exact_states:
            self.exact_states[length] = [self.arms.exact(tokens) for tokens in parts]
        scores = [
            compare(self.arms, tokens, tap, state)
            for tokens, state in zip(parts, self.exact_states[length], strict=True)
        ]
        own = [(float(score.kl.mean()), float(score.agree.double().mean())) for score in scores]
        kl, agree = np.mean(self.team.gather(own, len(sequences)), axis=0)
        return float(kl), 1.0 - float(agree)

    def choose_and_verify(self) -> Calibration:
        """Returns the first plan that passes, or the exact plan."""
        s = self.settings
        backoff = Backoff(limit=s.tries)
        alpha = np.ones(len(s.lengths))
        history: list[dict[str, Any]] = []
        flips_allowed = 1.0 - Gates.for_budget(s.budget).top1
        sentence = "no choice saves time inside the budget on this machine"
        while not backoff.exhausted:
            limit = np.full(len(s.lengths), s.budget * backoff.share)
            found = self.solve(limit / alpha, backoff.demoted)
            for step in range(JOINT_STEPS):
                self.progress("joint", step, JOINT_STEPS)
                if not found.picks.any():
                    break
                pairs = [self.joint(found.picks, length) for length in s.lengths]
                measured, flips = np.array([kl for kl, _ in pairs]), np.array([flip for _, flip in pairs])
                predicted = found.risk * alpha
                history.append(
                    {"predicted": predicted.tolist(), "measured": measured.tolist(), "flips": flips.tolist()}
                )
                # Spend what the budget allows, but never twice as much because one measurement came out small.
                alpha = np.array(
                    [
                        max(rescale(a, p, m), 0.5 * a)
                        for a, p, m in zip(alpha, predicted, measured, strict=True)
                    ]
                )
                # Flips of the likeliest token grow with the root of the KL: what fails that gate is not worth a try.
                over = flips > 0.95 * flips_allowed
                limit = np.where(
                    over,
                    np.minimum(limit, measured * (0.85 * flips_allowed / np.maximum(flips, 1e-9)) ** 2),
                    limit,
                )
                if not over.any() and (np.abs(measured / np.maximum(predicted, 1e-30) - 1.0) <= 0.2).all():
                    break
                found = self.solve(limit / alpha, backoff.demoted)
            self.progress("joint", JOINT_STEPS, JOINT_STEPS)
            if not found.picks.any():
                break
            verified = self._verify(found, alpha, backoff.tries + 1)
            history.append({"verified": asdict(verified)})
            if verified.passed:
                plan, tensors = self._finish(found.picks, verified, alpha)
                return Calibration(
                    plan, tensors, True, verified.sentence, self._report(history, found, alpha)
                )
            sentence = verified.sentence
            risk = (self.risks() * alpha[:, None, None]).max(axis=0)
            backoff = backoff.failed(risk[np.arange(len(self.units)), found.picks])
        exact = np.zeros(len(self.units), dtype=np.int64)
        text = f"the budget of {s.budget:.3g} nats/token cannot be met: {sentence}; the plan is exact"
        plan, _ = self._finish(exact, None, alpha)
        return Calibration(plan, {}, False, text, self._report(history, None, alpha))

    def _verify(self, found: Allocation, alpha: Array, tries: int) -> Verified:
        """The verdict over all lengths: the worst of them."""
        s = self.settings
        programs = self.programs(found.picks)
        confidence = 1.0 - adjusted_alpha(s.alpha, s.tries)
        verdicts = []
        for place, length in enumerate(s.lengths):
            held = self.samples[length][0][f"try {tries}"]

            def step(done: int, total: int, length: int = length) -> None:
                self.progress(f"verify {length}", done, total)

            step(0, len(held) + s.haystacks)

            evidence = verify.gather(
                self.arms,
                programs,
                held,
                haystacks=s.haystacks,
                needles=min(s.needles, needles.most(length)),
                seed=s.seed + tries,
                step=step,
            )
            verdicts.append(
                verify.judge(
                    evidence,
                    Gates.for_budget(s.budget),
                    confidence=confidence,
                    tries=tries,
                    share=verify.activation(programs, dict.fromkeys(self.layers, self.kv_heads), length),
                    predicted=float(found.risk[place] * alpha[place]),
                )
            )
        worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.upper))
        self.verdicts = verdicts
        return worst

    # ------------------------------------------------------------------ the plan
    def make_plan(
        self, picks: NDArray[np.int64], verified: Verified | None, lengths: tuple[int, ...]
    ) -> Plan:
        """Returns the plan of an allocation."""
        choices = self.candidates.choices
        layers, units = [], []
        risks = self.risks().max(axis=0)
        price, exact_price = (
            shared_prices(one, self.prices, self.launches) for one in (picks, np.zeros_like(picks))
        )
        dropped = sum(self.state.dropped.values()) / max(sum(self.state.done.values()), 1)
        for place, index in enumerate(self.layers):
            mine = picks[place * self.kv_heads : (place + 1) * self.kv_heads]
            layer = LayerPlan(index, self.hashes[index], tuple(choices[pick] for pick in mine))
            if layer.is_exact:
                continue
            layers.append(layer)
            for head, pick in enumerate(mine):
                unit = place * self.kv_heads + head
                units.append(
                    UnitRecord(
                        index,
                        head,
                        float(risks[unit, pick]),
                        float(price[unit]),
                        float(exact_price[unit]),
                        *(float(value) for value in np.asarray(dropped)[unit, pick]),
                    )
                )
        digest = hashlib.sha256("".join(self.hashes[index] for index in self.layers).encode()).hexdigest()
        return Plan(
            format=PLAN_FORMAT,
            model_type=self.model_type,
            weight_hash=digest,
            dtype=self.dtype,
            adaattn=_version("adaattn-hf"),
            torch=torch.__version__,
            transformers=_version("transformers"),
            budget=self.settings.budget,
            seed=self.settings.seed,
            data_fingerprint=self.fingerprint,
            protocol={},
            lengths=lengths,
            layers=tuple(layers),
            units=tuple(units),
            verified=verified,
            tensors="",
        )

    def _finish(
        self, picks: NDArray[np.int64], verified: Verified | None, alpha: Array
    ) -> tuple[Plan, dict[str, Tensor]]:
        plan = self.make_plan(picks, verified, self.settings.lengths)
        tensors: dict[str, Tensor] = {}
        for layer in plan.layers:
            tensors.update(_needed(layer, self.tensors[layer.layer]))
        settings = asdict(self.settings)
        settings.pop("budget"), settings.pop("seed"), settings.pop("lengths")
        table = self.table
        protocol = {
            "settings": {
                name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()
            },
            "alpha": [float(value) for value in alpha],
            "prices": table.digest if table is not None else "",
            "machine": table.machine if table is not None else "",
            "clusters": "documents where there are at least eight of them, stretches of text otherwise",
        }
        return replace(plan, protocol=protocol, tensors=attach.remember_tensors(tensors)), tensors

    def _report(
        self, history: list[dict[str, Any]], found: Allocation | None, alpha: Array
    ) -> dict[str, Any]:
        exact = np.zeros(len(self.units), dtype=np.int64)
        base = evaluate(exact, self.prices, self.risks(), self.launches).price
        return {
            "prices": self.table.to_json() if self.table is not None else "",
            "history": history,
            "alpha": alpha.tolist(),
            "verdicts": [asdict(verdict) for verdict in getattr(self, "verdicts", [])],
            "price_exact_seconds": base,
            "price_plan_seconds": found.price if found is not None else base,
            "risk": found.risk.tolist() if found is not None else [],
        }


def prepare_run(
    model: nn.Module,
    encode: Callable[[str], Sequence[int]],
    data: Sequence[str | Path],
    settings: CalibrationSettings,
    verify_data: Sequence[str | Path] | None = None,
    prices: PriceTable | None = None,
) -> Run:
    """Returns a calibration with risks and prices measured and nothing chosen, for studies."""
    run = Run(model, encode, list(data), settings, list(verify_data) if verify_data else None, silent)
    run.measure(None, False)
    run.price(prices)
    return run


def ablation_rows(run: Run, allowed: Callable[[Choice], bool], budget: float) -> dict[str, float]:
    """Returns predicted and measured loss and the price ratio of the best plan of allowed choices inside a budget."""
    return run.evaluate(run.solve(np.full(len(run.settings.lengths), budget), allowed=allowed).picks)


def _needed(layer: LayerPlan, tensors: LayerTensors) -> Mapping[str, Tensor]:
    """The tensors that a layer's choices read, by their names in the file."""
    needed: dict[str, Tensor] = {}
    prefix = f"layers.{layer.layer}."
    if any(choice.precision == "int8" for choice in layer.choices) and tensors.key_mean is not None:
        needed[f"{prefix}key_mean"] = tensors.key_mean.cpu().contiguous()
    for head, choice in enumerate(layer.choices):
        if choice.rank:
            needed[f"{prefix}query_basis.{head}"] = (
                tensors.query_basis[head][:, : choice.rank].cpu().contiguous()
            )
            needed[f"{prefix}key_basis.{head}"] = tensors.key_basis[head][:, : choice.rank].cpu().contiguous()
    return needed


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def save_plan(model: nn.Module, result: Calibration, directory: Path) -> None:
    """Writes the plan beside a model's weights: into `config.json`, and bases and means into their safetensors file."""
    attach.attach(model, result.plan)
    data = attach.tensor_bytes(result.plan)
    if data is not None:
        write_atomically(directory / TENSORS_FILE, data)
    model.config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    write_atomically(directory / "adaattn_plan.json", result.plan.to_json().encode())
