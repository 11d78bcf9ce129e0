"""Records statistics of attention while a model runs: entropy, sinks, distances, block density, ranks, rounding noise.

with adaattn_hf.record(model) as record:
    model.generate(**inputs)
print(record)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.heads import some_heads, some_rows
from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.backends.select import choose
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.execute import rows_within
from adaattn_hf.plans.plan import Plan
from adaattn_hf.stats.profile import DISTANCES, SINK_KEYS, head_sums, means, pooled_weights, stratified_rows
from adaattn_hf.stats.spectrum import Gram, effective_rank, energy_rank, gram, score_spectrum

from ..models.support import Holder, model_in, refuse_other_attention
from ..plans.bound import BoundPlan

ENERGIES = (0.95, 0.99, 0.999)
"""Shares of the scores' energy for which the smallest sufficient rank is reported."""
SIZE = 128
"""Largest number of rows and columns of a map; longer prompts are pooled."""


@dataclass
class _Layer:
    """What was seen of a layer; calls, their longest length in keys and sums over rows are kept by phase."""

    name: str
    calls: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    moments: Gram | None = None
    backends: Counter[str] = field(default_factory=Counter)
    structures: Counter[str] = field(default_factory=Counter)


def plan_map(call: AttentionCall, head: int, bound_layer: BoundLayer | None) -> Tensor:
    """Returns the pooled weights `[rows, columns]` of a query head, of what a plan computes, exact ones without.

    ValueError for a prompt longer than it covers.
    """
    if bound_layer is None:
        return pooled_weights(call, head, (SIZE, SIZE))
    if rows_within(call.structure, bound_layer.max_length, call.query.device) is not True:
        raise ValueError(
            f"maps: the prompt has {call.structure.kv_len} tokens, and the plan speaks for {bound_layer.max_length}, "
            "behind which rows are exact; give a shorter prompt"
        )
    groups = call.query.shape[1] // call.key.shape[1]
    kv_heads = [head // groups]
    planned = bound_layer.plan.choices[kv_heads[0]].defined(some_heads(call, kv_heads), kv_heads, bound_layer.tensors)
    return pooled_weights(planned, head % groups, (SIZE, SIZE))


class AttentionRecord:
    """The recorded statistics. `print` shows a table of layers; `to_dict` and `figure` give everything.

    Attributes:
        layers: By layer index.
        maps: Attention maps of the requested heads, by `(layer, head)`.
        errors: For the same heads, exact weights minus those of the plan that they are compared with.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        seed: int,
        maps: dict[tuple[int, int], Tensor | None],
        bound_layers: Mapping[int, BoundLayer | None] | None = None,
    ) -> None:
        self.layers: dict[int, _Layer] = {}
        self.maps, self.bound_layers = maps, bound_layers
        self.errors: dict[tuple[int, int], Tensor] = {}
        self.rows = rows
        self._generator = torch.Generator().manual_seed(seed)
        self._names = {id(module): name for name, module in model.named_modules() if hasattr(module, "is_causal")}
        self._numbers: dict[int, int] = {}

    @torch.no_grad()
    def _add(self, module: nn.Module, call: AttentionCall, out: Tensor) -> None:
        """Adds the statistics of sampled rows of a call, if it is a call of this model."""
        if id(module) not in self._names:
            return
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            index = self._numbers.setdefault(id(module), len(self._numbers))
        layer = self.layers.setdefault(index, _Layer(self._names[id(module)]))
        kind, call = call.checked_kind(), call.dequantised()  # what a cache stores as codes
        layer.backends[choose(kind, call.backend).name] += 1
        layer.structures[kind.shape] += 1
        structure = call.structure
        phase = "prefill"
        if structure.q_len == 1 and structure.kv_len > 1:
            phase = "decode"
        elif structure.k_segments is not None:
            phase = "packed"
        elif structure.key_padding is not None and not bool(structure.key_padding.all()):
            phase = "padded"
        layer.calls[phase] += 1
        layer.longest[phase] = max(layer.longest[phase], structure.kv_len)
        sums = layer.sums.setdefault(phase, {})
        (batch, heads), padding = call.query.shape[:2], structure.key_padding
        chosen = stratified_rows(structure.q_len, self.rows, self._generator).to(call.query.device)
        sampled = some_rows(call, chosen)
        visible = sampled.structure.visible(device=call.query.device).expand(batch, -1, -1, -1)
        if padding is not None and (structure.causal or structure.q_len == structure.kv_len):
            # rows of padding see keys, too, but say nothing of the text
            place = (chosen + structure.q_offset).clamp(0, structure.kv_len - 1)
            visible = visible & padding.to(place.device)[:, None, place, None]
        for row in range(batch):
            answer = out[row].transpose(0, 1)[:, chosen]
            sums_of_row = head_sums(sampled, row, visible[row], chosen + structure.q_offset, answer)
            sums |= {name: sums[name] + values if name in sums else values for name, values in sums_of_row.items()}
        if phase != "decode" and structure.q_len == structure.kv_len:
            for row in range(batch):
                query, key = call.query[row : row + 1], call.key[row : row + 1]
                if padding is not None:
                    real = padding[row].to(query.device)
                    query, key = query[:, :, real], key[:, :, real]
                moments = gram(query, key)
                layer.moments = moments if layer.moments is None else layer.moments + moments
        for (number, head), image in [*self.maps.items()]:
            if number == index and image is None and head < heads and phase != "decode":
                self.maps[number, head] = exact = plan_map(call, head, None)
                if self.bound_layers is not None:
                    self.errors[number, head] = exact - plan_map(call, head, self.bound_layers.get(index))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values: means per layer, phase and query head, ranks per key/value head, and counts of calls."""
        return {
            "format": 1,
            "rows_per_call": self.rows,
            "distance_edges": list(DISTANCES),
            "sink_keys": SINK_KEYS,
            "rank_energies": list(ENERGIES),
            "layers": [self._layer(index) for index in sorted(self.layers)],
            "maps": [
                {"layer": at[0], "head": at[1], "weights": _rounded(image)}
                | ({"error": _rounded(self.errors[at])} if at in self.errors else {})
                for at, image in self.maps.items()
                if image is not None
            ],
        }

    def _layer(self, index: int) -> dict[str, Any]:
        layer = self.layers[index]
        entry: dict[str, Any] = {
            "layer": index,
            "name": layer.name,
            "backends": dict(layer.backends),
            "structures": dict(layer.structures),
            "phases": {
                phase: {
                    "calls": layer.calls[phase],
                    "longest": layer.longest[phase],
                    "rows": int(sums["rows"][0]),
                    "heads": {name: _rounded(values) for name, values in means(sums).items()},
                }
                for phase, sums in layer.sums.items()
            },
        }
        if layer.moments is not None:
            spectrum = score_spectrum(layer.moments.centred())
            entry["scores"] = {
                "spectrum": _rounded(spectrum / spectrum[..., :1].clamp(min=1e-300)),
                "rank": {str(energy): energy_rank(spectrum, energy).tolist() for energy in ENERGIES},
                "effective_rank": _rounded(effective_rank(spectrum)),
            }
        return entry

    def __str__(self) -> str:
        """One line per layer and phase: means over heads."""
        lines = ["layer phase    calls  entropy  support    sinks  95% blocks  SQNR int8  as run  backends"]
        for index, layer in sorted(self.layers.items()):
            backends = ", ".join(f"{name} x{count}" for name, count in sorted(layer.backends.items()))
            for phase, sums in layer.sums.items():
                mean = {name: float(values.mean()) for name, values in means(sums).items()}
                lines.append(
                    f"{index:5} {phase:8} {layer.calls[phase]:5}  {mean['entropy']:7.3f}  {mean['support']:7.1f}  "
                    f"{mean['sink_mass']:7.3f}  {mean['block_density_95']:10.3f}  {mean['sqnr_int8']:6.1f} dB  "
                    f"{mean['sqnr_answer']:5.0f} dB  {backends}"
                )
        if not self.layers:
            lines.append("no attention call of this model was seen (a compiled graph's calls cannot be)")
        return "\n".join(lines)

    def figure(self, phase: str = "prefill") -> Any:
        """Returns a matplotlib figure of entropy, sink mass, block density and int8 noise by layer and head.

        Raises:
            ValueError: No call of that phase was recorded.
        """
        from matplotlib.figure import Figure

        layers = [self._layer(index) for index in sorted(self.layers)]
        layers = [layer for layer in layers if phase in layer["phases"]]
        if not layers:
            phases = sorted({name for layer in self.layers.values() for name in layer.sums})
            raise ValueError(f"phase: got {phase!r}, expected one that was seen: {', '.join(phases) or 'none was'}")
        labels = {
            "entropy": "entropy (nats)",
            "sink_mass": f"mass on the first {SINK_KEYS} keys",
            "block_density_95": "blocks for 95 % of the mass",
            "sqnr_int8": "int8 operands: SQNR (dB)",
        }
        figure = Figure(figsize=(10, 7), layout="constrained")
        for axes, (name, label) in zip(figure.subplots(2, 2).flat, labels.items(), strict=True):
            image = axes.imshow(
                [layer["phases"][phase]["heads"][name] for layer in layers], aspect="auto", cmap="cividis"
            )
            axes.set(title=label, xlabel="head", ylabel="layer")
            axes.set_yticks(range(len(layers)), [str(layer["layer"]) for layer in layers])
            figure.colorbar(image, ax=axes)
        return figure


def _rounded(values: Tensor) -> Any:
    def entry(value: Any) -> Any:
        if isinstance(value, list):
            return [entry(item) for item in value]
        return float(f"{value:.6g}") if abs(value) < float("inf") else None

    return entry(values.double().cpu().tolist())


@contextmanager
def record(
    model: Holder,
    *,
    rows: int = 64,
    seed: int = 0,
    maps: tuple[tuple[int, int], ...] = (),
    against: Plan | str | Path | None = None,
) -> Iterator[AttentionRecord]:
    """Records statistics of a model's attention in prefill, decode, padded and packed calls of this thread.

    The model is not changed, and nothing listens after the block, not even after an exception. Calls inside a compiled
    graph cannot be recorded.

    Args:
        model: A model with an attention implementation of this package, with or without a plan, or what holds it (a
            pipeline, PEFT, sentence-transformers).
        rows: Query rows sampled per call, one from each of as many equal parts.
        seed: Seed of the sample.
        maps: Pairs of layer and query head whose pooled attention map is kept, from the first prompt.
        against: For the heads of `maps`, also keep the error of their weights under this plan (see
            `Plan.from_pretrained`), which need not be the model's own.

    Yields:
        The record, which may be read at any time.

    Raises:
        ValueError: The model runs another attention implementation, or `rows` is not positive.
        PlanError: The plan `against` does not belong to the model.
    """
    if rows < 1:
        raise ValueError(f"rows: got {rows}, expected at least 1 sampled row per call")
    root = model_in(model)
    refuse_other_attention(root)
    bound_layers = None
    if against is not None:
        bound_layers = BoundPlan.of(root, Plan.from_pretrained(against), unverified=True).by_index
    recorded = AttentionRecord(root, rows, seed, dict.fromkeys(maps), bound_layers)
    with listening(Listener(after=recorded._add, whole="adaattn_hf.record")):
        yield recorded
