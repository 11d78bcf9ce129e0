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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf import attach, corpus, execute, fisher, pricing, verify
from adaattn_hf.approximate import LayerTensors
from adaattn_hf.arms import ModelArms, Progress, compare, plan_tap, programs_of, silent
from adaattn_hf.calibration_state import CalibrationState, write_atomically
from adaattn_hf.corpus import TokenSequence
from adaattn_hf.plan import EXACT, PLAN_FORMAT, Choice, LayerPlan, Plan, UnitRecord, Verified
from adaattn_hf.policy.acceptance import Gates
from adaattn_hf.policy.backoff import Backoff, adjusted_alpha
from adaattn_hf.policy.candidates import FAMILIES, MASSES, WINDOWS, Candidates, candidates
from adaattn_hf.policy.knapsack import Allocation, allocate
from adaattn_hf.policy.prices import PriceTable
from adaattn_hf.policy.risk import rescale
from adaattn_hf.request import AttentionRequest
from adaattn_hf.stats.spectrum import score_factors
from adaattn_hf.tap import tapping

Array = NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationSettings:
    """How a plan is made.

    Attributes:
        budget: Allowed loss, nats/token; ln(1 + b) for a relative rise b of the perplexity.
        lengths: Length bins in tokens, rising; beyond the last one the plan is exact.
        seed: Seed of the text sample, the labels, the rows and the needles.
        sequences: Sequences per length that risks are measured on.
        rows: Query rows sampled per sequence.
        labels: Label draws, one backward pass each.
        joint: Sequences per length that re-scale the risks.
        held_out: Sequences per length and try that verify.
        tries: Plans that may be verified before the answer is "exact".
        haystacks: Held-out sequences per length that also carry needles.
        needles: Needles per haystack.
        families: Kinds of choices to consider; see `policy.candidates.FAMILIES`.
        windows: Windows to consider.
        masses: Shares of attention to keep by blocks.
        decode_tokens: Decode steps per prefill, which weigh the prices of the phases.
        alpha: Level of the test over all tries.
    """

    budget: float = 9.995003330835334e-04
    lengths: tuple[int, ...] = (4096,)
    seed: int = 0
    sequences: int = 4
    rows: int = 256
    labels: int = 2
    joint: int = 1
    held_out: int = 12
    tries: int = 3
    haystacks: int = 1
    needles: int = 8
    families: tuple[str, ...] = FAMILIES
    windows: tuple[int, ...] = WINDOWS
    masses: tuple[float, ...] = MASSES
    decode_tokens: int = 64
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if not self.budget > 0.0:
            raise ValueError(
                f"budget is {self.budget}, expected a loss above 0 nats/token; no budget needs no plan"
            )
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 32:
            raise ValueError(
                f"lengths is {list(self.lengths)}, expected rising numbers of at least 32 tokens"
            )
        for name in ("sequences", "rows", "labels", "joint", "tries", "needles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.held_out < 2:
            raise ValueError(f"held_out is {self.held_out}, expected at least 2: one sequence has no spread")


@dataclass(eq=False)
class Calibration:
    """What a calibration found.

    Attributes:
        plan: The plan: verified, or exact where none passed.
        tensors: Bases and means that the plan needs, by name.
        met: Whether a plan that approximates passed.
        sentence: The outcome in words.
        report: Everything measured, for a report.
    """

    plan: Plan
    tensors: dict[str, Tensor]
    met: bool
    sentence: str
    report: dict[str, Any] = field(default_factory=dict)


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
    run = _Run(model, encode, list(data), settings, list(verify_data) if verify_data else None, progress)
    run.measure(directory, resume)
    run.price(prices)
    result = run.choose_and_verify()
    if directory is not None:
        CalibrationState.forget(directory)
    return result


class _Run:
    """One calibration: what each stage leaves for the next."""

    def __init__(
        self,
        model: nn.Module,
        encode: Callable[[str], Sequence[int]],
        data: list[str | Path],
        settings: CalibrationSettings,
        verify_data: list[str | Path] | None,
        progress: Progress,
    ) -> None:
        self.model, self.settings, self.progress = model, settings, progress
        if model.config._attn_implementation != "adaattn":  # type: ignore[union-attr]
            raise ValueError(
                f"attn_implementation is {model.config._attn_implementation!r}, expected 'adaattn': "  # type: ignore[union-attr]
                'load the model with from_pretrained(..., attn_implementation="adaattn")'
            )
        model.eval()
        self.arms = ModelArms(model)
        self.samples = {length: self._draw(data, verify_data, encode, length) for length in settings.lengths}
        self.fingerprint = hashlib.sha256(
            "".join(f"{n}:{own}:{other}" for n, (_, own, other) in sorted(self.samples.items())).encode()
        ).hexdigest()
        self.moments = self._moments()
        self.layers = sorted(self.moments.shapes)
        kv_heads = {self.moments.shapes[index][1] for index in self.layers}
        if len(kv_heads) != 1:
            raise ValueError(
                f"layers have {sorted(kv_heads)} key/value heads; plans serve models with one number of them"
            )
        self.kv_heads = kv_heads.pop()
        self.units = [(layer, head) for layer in self.layers for head in range(self.kv_heads)]
        self.model_type = self._attention_config().model_type
        self.modules = dict(attach.attention_modules(model, self.model_type))
        self.hashes = {index: attach.weight_hash(self.modules[index]) for index in self.layers}
        self.dtype = attach.module_dtype(self.modules[self.layers[0]])
        self.candidates: Candidates = candidates(
            settings.lengths[-1],
            min(shape[2] for shape in self.moments.shapes.values()),
            self.dtype,
            settings.families,
            settings.windows,
            settings.masses,
        )
        self.tensors = {index: self._layer_tensors(index) for index in self.layers}
        self.table: PriceTable | None = None

    # ------------------------------------------------------------------ text
    def _draw(
        self,
        data: list[str | Path],
        verify_data: list[str | Path] | None,
        encode: Callable[[str], Sequence[int]],
        n: int,
    ) -> tuple[dict[str, list[TokenSequence]], str, str]:
        s = self.settings
        own = {"risk": s.sequences, "joint": s.joint}
        held = {f"try {number}": s.held_out for number in range(1, s.tries + 1)}
        if verify_data is None:
            sample = corpus.draw(data, encode, n, {**own, **held}, s.seed)
            return sample.parts, sample.fingerprint, ""
        first = corpus.draw(data, encode, n, own, s.seed)
        second = corpus.draw(verify_data, encode, n, held, s.seed)
        return {**first.parts, **second.parts}, first.fingerprint, second.fingerprint

    def _tokens(self, sequence: TokenSequence) -> Tensor:
        return torch.tensor([sequence.tokens], device=self.arms.device)

    def _attention_config(self) -> Any:
        for module in self.model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "config") and hasattr(module, "is_causal"):
                return module.config
        raise ValueError(
            "the model has no attention modules with a layer_idx; a plan could not name its layers"
        )

    # ------------------------------------------------------------------ pass zero and one
    def _moments(self) -> fisher.Moments:
        """Mean keys, Grams and the calls that will be timed, from one sequence of each length."""
        moments = fisher.Moments()
        self.calls: dict[int, AttentionRequest] = {}
        for number, (length, (parts, _, _)) in enumerate(sorted(self.samples.items())):
            seen: list[AttentionRequest] = []

            def tap(
                module: nn.Module, request: AttentionRequest, seen: list[AttentionRequest] = seen
            ) -> Tensor:
                seen.append(request)
                return moments.tap(module, request)

            self.progress("moments", number, len(self.samples))
            with torch.no_grad(), tapping(tap):
                self.arms.hidden(self._tokens(parts["risk"][0]))
            if not seen:
                raise ValueError(
                    "the model made no attention call through adaattn; it may not use the attention interface"
                )
            self.calls[length] = seen[len(seen) // 2]
        if not all(moments.causal.values()):
            raise ValueError(
                "attention is bidirectional: calibration draws labels of the next token and serves causal models"
            )
        return moments

    def _layer_tensors(self, index: int) -> LayerTensors:
        gram = self.moments.grams[index]
        ranks = [choice.rank for choice in self.candidates.choices if choice.rank]
        device = self.arms.device
        if not ranks:
            return LayerTensors(gram.key_mean.float().to(device))
        query_basis, key_basis = score_factors(gram.centred(), max(ranks))
        return LayerTensors(
            gram.key_mean.float().to(device),
            {head: query_basis[head].float().to(device) for head in range(self.kv_heads)},
            {head: key_basis[head].float().to(device) for head in range(self.kv_heads)},
        )

    def measure(self, directory: Path | None, resume: bool) -> None:
        """Pass one: risks and dropped masses of every unit and choice, per length."""
        s = self.settings
        identity = {**asdict(s), "weights": self.hashes, "text": self.fingerprint, "dtype": self.dtype}
        identity.pop("budget"), identity.pop("held_out"), identity.pop("tries")
        self.state = CalibrationState(identity, s.lengths, len(self.units), len(self.candidates.choices))
        if resume and directory is not None:
            self.state.load(directory)
        total = s.sequences * len(s.lengths)
        for length in s.lengths:
            for number in range(self.state.done[length], s.sequences):
                self.progress("risk", sum(self.state.done.values()), total)
                self._measure_one(length, number)
                self.state.done[length] = number + 1
                if directory is not None:
                    self.state.save(directory)
        self.progress("risk", total, total)

    def _measure_one(self, length: int, number: int) -> None:
        s = self.settings
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + length * 1009 + number)
        sums = np.zeros((len(self.units), len(self.candidates.choices)))
        rows = 0

        def add(products: dict[int, Tensor]) -> None:
            nonlocal rows
            part, count = fisher.unit_risks(products, self.kv_heads, self.candidates.combine)
            sums.__iadd__(part)
            rows += count

        recorder = fisher.measure(
            self.arms,
            self._tokens(self.samples[length][0]["risk"][number]),
            self.candidates.parts,
            self.tensors,
            rows=s.rows,
            labels=s.labels,
            generator=generator,
            on_products=add,
        )
        self.state.risks[length].add(sums, rows)
        self.state.dropped[length] += self._dropped(recorder)

    def _dropped(self, recorder: fisher.FisherRecorder) -> Array:
        """Mean, 95th percentile and mean square of the mass that a choice drops, the worst query head of a unit."""
        found = np.zeros((len(self.units), len(self.candidates.choices), 3))
        for place, index in enumerate(self.layers):
            mass = recorder.dropped[index].double()
            parts, heads, rows = mass.shape
            grouped = mass.view(parts, self.kv_heads, heads // self.kv_heads, rows).amax(2)
            stats = torch.stack(
                [grouped.mean(-1), torch.quantile(grouped, 0.95, dim=-1), grouped.square().mean(-1)], dim=-1
            )
            # a combined choice drops what its sparse part drops: the precisions among the parts drop nothing
            mixed = torch.einsum("cb,bus->ucs", torch.from_numpy(self.candidates.combine).to(stats), stats)
            found[place * self.kv_heads : (place + 1) * self.kv_heads] = mixed.cpu().numpy()
        return found

    # ------------------------------------------------------------------ prices
    def price(self, prices: PriceTable | None) -> None:
        """Times the launches unless prices were given."""
        self.progress("prices", 0, 1)
        middle = self.layers[len(self.layers) // 2]
        if prices is None:
            prices = pricing.measure_prices(self.calls, self.candidates.choices, self.tensors[middle])
        self.table = prices
        self.prices, self.launches = pricing.unit_prices(
            prices,
            self.candidates.choices,
            self.units,
            lengths=self.settings.lengths,
            decode_tokens=self.settings.decode_tokens,
        )
        self.progress("prices", 1, 1)

    # ------------------------------------------------------------------ choose, verify, back off
    def risks(self) -> Array:
        """Returns the risks `[lengths, units, choices]` in nats/token, not re-scaled."""
        return np.stack([self.state.risks[length].mean() for length in self.settings.lengths])

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

    def ratio(self, picks: NDArray[np.int64], length: int, phase: str = "prefill") -> float:
        """Returns how many times faster than exact attention the launches of an allocation are, by the price table."""
        table = self.table
        if table is None:
            raise ValueError("no prices were measured; call price() first")
        choices = self.candidates.choices

        def seconds(mine: NDArray[np.int64]) -> float:
            constants: dict[str, float] = {}
            total = 0.0
            for pick in mine:
                price = table.price(phase, length, choices[pick].label)
                name = execute.launch_name(choices[pick], table.shared)
                constants[name] = max(constants.get(name, 0.0), price.constant)
                total += price.slope
            return total + sum(constants.values())

        per_layer = picks.reshape(len(self.layers), self.kv_heads)
        exact = seconds(np.zeros(self.kv_heads, dtype=np.int64)) * len(self.layers)
        return exact / sum(seconds(mine) for mine in per_layer)

    def evaluate(self, picks: NDArray[np.int64]) -> dict[str, float]:
        """Returns predicted and measured loss and the price ratio of an allocation at the longest length."""
        length = self.settings.lengths[-1]
        held = self.samples[length][0]["try 1"]
        evidence = verify.gather(self.arms, self.programs(picks), held)
        bound = evidence.bound(0.95)
        units = np.arange(len(self.units))
        return {
            "predicted": float(self.risks()[-1, units, picks].sum()),
            "delta_nll": bound.mean,
            "upper": bound.upper,
            "kl": float(torch.cat(evidence.kl).mean()),
            "ratio": self.ratio(picks, length),
        }

    def uniform(self, choice: Choice) -> dict[str, float]:
        """Returns the same for one choice on every unit."""
        return self.evaluate(np.full(len(self.units), self.candidates.choices.index(choice)))

    def programs(self, picks: NDArray[np.int64]) -> dict[int, Any]:
        """Returns the programs of an allocation."""
        return programs_of(self.make_plan(picks, None, self.settings.lengths), self.tensors)

    def joint_kl(self, picks: NDArray[np.int64], length: int) -> float:
        """Returns the measured KL of an allocation on the sequences set aside for it."""
        tap = plan_tap(self.programs(picks))
        parts = self.samples[length][0]["joint"]
        return float(
            np.mean([float(compare(self.arms, self._tokens(part), tap).kl.mean()) for part in parts])
        )

    def choose_and_verify(self) -> Calibration:
        """Returns the first plan that passes, or the exact plan."""
        s = self.settings
        backoff = Backoff(limit=s.tries)
        alpha = np.ones(len(s.lengths))
        history: list[dict[str, Any]] = []
        sentence = "no choice saves time inside the budget on this machine"
        while not backoff.exhausted:
            limit = np.full(len(s.lengths), s.budget * backoff.share)
            found = self.solve(limit / alpha, backoff.demoted)
            for _ in range(2):
                if not found.picks.any():
                    break
                self.progress("joint", len(history), s.tries)
                measured = np.array([self.joint_kl(found.picks, length) for length in s.lengths])
                predicted = found.risk * alpha
                history.append({"predicted": predicted.tolist(), "measured": measured.tolist()})
                before = alpha.copy()
                alpha = np.array(
                    [rescale(a, p, m) for a, p, m in zip(alpha, predicted, measured, strict=True)],
                    dtype=np.float64,
                )
                # Spend what the budget allows, but never more because one measurement came out small.
                alpha = np.maximum(alpha, 0.5 * before)
                if (np.abs(measured / np.maximum(predicted, 1e-30) - 1.0) <= 0.2).all():
                    break
                found = self.solve(limit / alpha, backoff.demoted)
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

            evidence = verify.gather(
                self.arms,
                programs,
                held,
                haystacks=s.haystacks,
                needles=s.needles,
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
        prices, risks = self.prices, self.risks().max(axis=0)
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
                        float(prices[unit, pick]),
                        float(prices[unit, 0]),
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
            "prices": hashlib.sha256(table.to_json().encode()).hexdigest() if table is not None else "",
            "machine": table.machine if table is not None else "",
            "clusters": "documents where there are at least eight of them, stretches of text otherwise",
        }
        return replace(plan, protocol=protocol, tensors=attach.remember_tensors(tensors)), tensors

    def _report(
        self, history: list[dict[str, Any]], found: Allocation | None, alpha: Array
    ) -> dict[str, Any]:
        exact = np.zeros(len(self.units), dtype=np.int64)
        from adaattn_hf.policy.knapsack import evaluate

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
) -> _Run:
    """Returns a calibration with risks and prices measured and nothing chosen, for studies."""
    run = _Run(model, encode, list(data), settings, list(verify_data) if verify_data else None, silent)
    run.measure(None, False)
    run.price(prices)
    return run


def ablation_rows(run: _Run, allowed: Callable[[Choice], bool], budget: float) -> dict[str, float]:
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
        write_atomically(directory / attach.TENSORS_FILE, data)
    model.config.save_pretrained(directory)  # type: ignore[union-attr, operator]
    write_atomically(directory / "adaattn_plan.json", result.plan.to_json().encode())


__all__ = ["EXACT", "Calibration", "CalibrationSettings", "Choice", "calibrate", "save_plan"]
