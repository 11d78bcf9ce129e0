"""The measuring half of a calibration, of one model, in passes over its text.

* pass zero: mean keys and Grams, and the calls that will be timed (`fisher.Moments`)
* pass one: the risk of every unit and choice (`fisher`)
* pass two, where it is asked for: the KL of the pairs that decide a plan, by forward passes of their own (`direct`)
* prices of the launches (`pricing`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf import attach, execute
from adaattn_hf.approximate import LayerTensors, Program
from adaattn_hf.calibration import corpus, direct, fisher, pricing, team
from adaattn_hf.calibration.arms import ModelArms, Progress
from adaattn_hf.calibration.corpus import TokenSequence
from adaattn_hf.calibration.scoring import NEXT_TOKEN, Reading, Scoring
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.state import CalibrationState
from adaattn_hf.plan import EXACT, LayerPlan
from adaattn_hf.policy.candidates import Candidates, candidates
from adaattn_hf.policy.knapsack import Array
from adaattn_hf.policy.prices import PriceTable
from adaattn_hf.policy.risk import corrected
from adaattn_hf.request import AttentionRequest
from adaattn_hf.stats.spectrum import score_factors
from adaattn_hf.tap import tapping


class Measurements:
    """Risks and prices of one model: what choosing needs."""

    def __init__(
        self,
        model: nn.Module,
        encode: Callable[[str], Sequence[int]],
        data: list[str | Path],
        settings: CalibrationSettings,
        verify_data: list[str | Path] | None,
        progress: Progress,
        scoring: Scoring = NEXT_TOKEN,
    ) -> None:
        settings = replace(settings, windows=scoring.windows(settings.windows))
        self.model, self.settings, self.progress, self.scoring = model, settings, progress, scoring
        self.team = team.present()
        if model.config._attn_implementation != "adaattn":  # type: ignore[union-attr]
            raise ValueError(
                f"attn_implementation is {model.config._attn_implementation!r}, expected 'adaattn': "  # type: ignore[union-attr]
                'load the model with from_pretrained(..., attn_implementation="adaattn")'
            )
        model.eval()
        positions = most_positions(model)
        if positions is not None and settings.lengths[-1] > positions:
            raise ValueError(
                f"lengths is {list(settings.lengths)}, expected at most the {positions} tokens that "
                f"{type(model).__name__} has positions for; give shorter lengths"
            )
        self.own_numbers = attach.number_layers(model)
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
            scoring.causal,
        )
        self.tensors = {index: self._layer_tensors(index) for index in self.layers}
        self.exact_states: dict[int, list[list[Tensor]]] = {}
        self.held_states: dict[int, dict[int, list[Tensor]]] = {}
        self.table: PriceTable | None = None
        self.directory: Path | None = None
        self.decided: list[tuple[int, int]] = []

    # ------------------------------------------------------------------ text
    def _draw(
        self,
        data: list[str | Path],
        verify_data: list[str | Path] | None,
        encode: Callable[[str], Sequence[int]],
        n: int,
    ) -> tuple[dict[str, list[TokenSequence]], str, str]:
        s = self.settings
        n = self.scoring.content(n)
        own = {"risk": s.sequences, "joint": s.joint}
        held = {f"try {number}": s.held_out for number in range(1, s.tries + 1)}
        if verify_data is None:
            sample = corpus.draw(data, encode, n, {**own, **held}, s.seed)
            return sample.parts, sample.fingerprint, ""
        first = corpus.draw(data, encode, n, own, s.seed)
        second = corpus.draw(verify_data, encode, n, held, s.seed)
        return {**first.parts, **second.parts}, first.fingerprint, second.fingerprint

    def readings(self, sequence: TokenSequence) -> list[Reading]:
        """Returns the passes over a sequence of calibration text."""
        return self.scoring.readings(sequence.tokens, self.settings.seed, self.arms.device)

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
        self.local_calls: dict[int, dict[int, AttentionRequest]] = {}
        for number, (length, (parts, _, _)) in enumerate(sorted(self.samples.items())):
            seen: list[AttentionRequest] = []

            def tap(
                module: nn.Module, request: AttentionRequest, seen: list[AttentionRequest] = seen
            ) -> Tensor:
                seen.append(request)
                return moments.tap(module, request)

            self.progress("moments", number, len(self.samples))
            with torch.no_grad(), tapping(tap):
                self.arms.hidden(self.readings(parts["risk"][0])[0])
            if not seen:
                raise ValueError(
                    "the model made no attention call through adaattn; it may not use the attention interface"
                )
            whole = [request for request in seen if request.structure.window is None] or seen
            self.calls[length] = whole[len(whole) // 2]
            for request in seen:
                own = request.structure.window
                if own is not None and own != self.calls[length].structure.window:
                    self.local_calls.setdefault(own, {})[length] = request
        self.progress("moments", len(self.samples), len(self.samples))
        if set(moments.causal.values()) != {self.scoring.causal}:
            kinds = sorted({"causal" if causal else "bidirectional" for causal in moments.causal.values()})
            wanted = "causal" if self.scoring.causal else "bidirectional"
            raise ValueError(
                f"scoring: {type(self.scoring).__name__} is for {wanted} attention, this model's is "
                f"{' and '.join(kinds)}; calibrate a masked-language model with scoring=MaskedTokens.of(tokenizer), a "
                "causal one with the default"
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
        self.directory = directory
        identity = {**asdict(s), "weights": self.hashes, "text": self.fingerprint, "dtype": self.dtype}
        if not self.scoring.causal:
            identity["scoring"] = self.scoring.words()
        for free in ("budget", "direct", "held_out", "tries"):
            identity.pop(free)
        self.state = CalibrationState(identity, s.lengths, len(self.units), len(self.candidates.choices))
        if resume and directory is not None:
            self.state.load(directory)
        total = s.sequences * len(s.lengths)
        for length in s.lengths:
            while (start := self.state.done[length]) < s.sequences:
                self.progress("risk", sum(self.state.done.values()), total)
                stop = min(start + self.team.size, s.sequences)
                own = [self._measure_one(length, number) for number in self.team.mine(stop, start)]
                for sums, rows, dropped in self.team.gather(own, stop, start):
                    self.state.risks[length].add(sums, rows)
                    self.state.dropped[length] += dropped
                self.state.done[length] = stop
                self._save()
        self.progress("risk", total, total)

    def _save(self) -> None:
        if self.directory is not None and self.team.leads:
            self.state.save(self.directory)

    def _measure_one(self, length: int, number: int) -> tuple[Array, int, Array]:
        """Sums of risk, rows and dropped masses of one sequence."""
        s = self.settings
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + length * 1009 + number)
        sums = np.zeros((len(self.units), len(self.candidates.choices)))
        dropped = np.zeros((*sums.shape, 3))
        rows = 0
        readings = self.readings(self.samples[length][0]["risk"][number])
        for reading in readings:

            def add(products: dict[int, Tensor], weight: float = reading.rows_per_prediction) -> None:
                nonlocal rows
                part, count = fisher.unit_risks(products, self.kv_heads, self.candidates.combine)
                sums.__iadd__(part * weight)
                rows += count

            recorder = fisher.measure(
                self.arms,
                reading,
                self.candidates.parts,
                self.tensors,
                rows=s.rows,
                labels=s.labels,
                generator=generator,
                on_products=add,
            )
            dropped += self._dropped(recorder) / len(readings)
        return sums, rows, dropped

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
        middle = self.tensors[self.layers[len(self.layers) // 2]]
        phases = pricing.PHASES if self.scoring.generates else ("prefill",)
        choices = self.candidates.choices
        if prices is None and self.team.leads:
            prices = pricing.joined(
                [
                    pricing.measure_prices(calls, choices, middle, phases=phases, own=own)
                    for own, calls in [(None, self.calls), *self.local_calls.items()]
                ]
            )
        prices = self.team.tell(prices)
        assert prices is not None
        pricing.check_prices(prices, choices, list(dict.fromkeys(self.kinds.values())), phases)
        self.table = prices
        self.prices, self.launches = pricing.unit_prices(
            prices,
            self.candidates.choices,
            self.units,
            lengths=self.settings.lengths,
            decode_tokens=self.settings.decode_tokens if self.scoring.generates else 0,
            windows=self.moments.windows,
            kinds=self.kinds,
        )
        self.progress("prices", 1, 1)

    # ------------------------------------------------------------------ pass two
    def measure_directly(self, pairs: list[tuple[int, int]]) -> None:
        """Pass two: the KL of pairs (unit, choice) by forward passes of their own, which `risks` reckons with."""
        s = self.settings
        total = len(pairs) * s.sequences * len(s.lengths)
        done = 0

        def step() -> None:
            nonlocal done
            self.progress("direct", done, total)
            done += self.team.size

        for length in s.lengths:
            known = self.state.direct[length]
            for number in range(s.sequences):
                missing = [pair for pair in pairs if (number, *pair) not in known]
                if not missing:
                    continue
                own = [missing[place] for place in self.team.mine(len(missing))]
                readings = self.readings(self.samples[length][0]["risk"][number])
                found = direct.measured_pairs(self.arms, readings, own, self._single, step)
                every = self.team.gather([found[pair] for pair in own], len(missing))
                known.update({(number, *pair): one for pair, one in zip(missing, every, strict=True)})
                self._save()
        self.progress("direct", total, total)
        self.decided = pairs

    def _single(self, unit: int, choice: int) -> Program:
        """The program of one unit taking one choice, the rest of its layer exact."""
        layer, head = self.units[unit]
        choices = [EXACT] * self.kv_heads
        choices[head] = self.candidates.choices[choice]
        return Program(LayerPlan(layer, "", tuple(choices)), self.tensors[layer], self.settings.lengths[-1])

    def direct_kl(self, length: int) -> tuple[Array, Array]:
        """Returns mean and standard error `[pairs]` of the KL measured directly at a length, nats/token."""
        known, numbers = self.state.direct[length], range(self.settings.sequences)
        found = [
            direct.mean_and_error([known[number, unit, choice] for number in numbers])
            for unit, choice in self.decided
        ]
        return np.array([mean for mean, _ in found]), np.array([error for _, error in found])

    def risks(self) -> Array:
        """Returns the risks `[lengths, units, choices]` in nats/token, not re-scaled, pass two reckoned with."""
        found = []
        for length in self.settings.lengths:
            table = self.state.risks[length]
            risk = table.mean()
            if self.decided:
                at = tuple(np.array(self.decided).T)
                own, factor = corrected(risk[at], table.standard_error()[at], *self.direct_kl(length))
                risk *= factor
                risk[at] = own
            found.append(risk)
        return np.stack(found)

    @property
    def kinds(self) -> dict[int, int | None]:
        """By layer: the window of layers that are priced apart, `None` for those of the kind priced first."""
        return {
            layer: own if own in self.local_calls else None for layer, own in self.moments.windows.items()
        }

    def ratio(self, picks: NDArray[np.int64], length: int, phase: str = "prefill") -> float:
        """Returns how many times faster than exact attention the launches of an allocation are, by the price table."""
        table = self.table
        if table is None:
            raise ValueError("no prices were measured; call price() first")
        choices, kinds = self.candidates.choices, self.kinds

        def seconds(layer: int, mine: NDArray[np.int64]) -> float:
            constants: dict[str, float] = {}
            total = 0.0
            for pick in mine:
                price = table.price(phase, length, pricing.launch_label(choices[pick], kinds[layer]))
                name = execute.launch_name(choices[pick], table.shared)
                constants[name] = max(constants.get(name, 0.0), price.constant)
                total += price.slope
            return total + sum(constants.values())

        per_layer = list(zip(self.layers, picks.reshape(len(self.layers), self.kv_heads), strict=True))
        exact = sum(seconds(layer, np.zeros_like(mine)) for layer, mine in per_layer)
        return exact / sum(seconds(layer, mine) for layer, mine in per_layer)


def most_positions(model: nn.Module) -> int | None:
    """Returns the most tokens that a model with a table of positions can read, `None` without such a table."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("position_embeddings", "wpe") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from behind the padding token
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None
