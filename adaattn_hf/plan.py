"""The plan: what attention computes per layer and key/value head. Data, decided once, stored with a checkpoint.

A plan never depends on the values of a call. Whatever it changes is a function of one head's query and of the
keys that its mask lets it see, so that it neither leaks the future into the past nor couples the examples of a
batch.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

PLAN_FORMAT = 1
TENSORS_FILE = "adaattn_plan.safetensors"
BLOCK = 64
"""Keys and queries per block of a `blocks` choice."""

Kind = Literal["exact", "window", "blocks"]
Precision = Literal["model", "bf16", "int8"]
KINDS: tuple[str, ...] = get_args(Kind)
PRECISIONS: tuple[str, ...] = get_args(Precision)

Record = TypeVar("Record")


class PlanError(ValueError):
    """A plan that is not well formed, or that does not belong to the model at hand."""


def read_record(cls: type[Record], data: Any, where: str) -> dict[str, Any]:
    """Returns `data` as keyword arguments for the dataclass, refusing keys that it does not have.

    Raises:
        PlanError: If `data` is no mapping, or a key is unknown or missing.
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} is {type(data).__name__}, expected a mapping of {cls.__name__} fields")
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PlanError(f"{where} has the unknown key {name!r}; known keys: {sorted(known)}{hint}")
    missing = sorted(known - set(data))
    if missing:
        raise PlanError(f"{where} lacks the keys {missing}; write the plan again with `adaattn calibrate`")
    return dict(data)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Choice:
    """What one key/value head (and the query heads that share it) computes.

    Attributes:
        kind: `exact` keeps all keys that the mask allows; `window` keeps the first `sinks` keys of the
            sequence and the last `window`; `blocks` keeps, per block of queries, the blocks of keys that hold
            a share `mass` of the pooled attention, with sinks, the own and the previous block always.
        window: Keys kept before a query, the query itself counted, and as many behind it where attention looks
            both ways; 0 unless `kind` is `window`.
        sinks: First keys kept beside the window or the blocks.
        mass: Share of pooled attention kept; 0 unless `kind` is `blocks`.
        rank: Score rank, columns kept of queries and keys; 0 keeps all.
        precision: `model` computes in the dtype at hand, `bf16` rounds queries, keys, weights and values to
            bfloat16, `int8` quantises queries, smoothed keys and values per token.
    """

    kind: Kind = "exact"
    window: int = 0
    sinks: int = 0
    mass: float = 0.0
    rank: int = 0
    precision: Precision = "model"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = difflib.get_close_matches(str(self.kind), KINDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PlanError(f"kind is {self.kind!r}, expected one of {list(KINDS)}{hint}")
        if self.precision not in PRECISIONS:
            near = difflib.get_close_matches(str(self.precision), PRECISIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PlanError(f"precision is {self.precision!r}, expected one of {list(PRECISIONS)}{hint}")
        for name in ("window", "sinks", "rank"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise PlanError(f"{name} is {value!r}, expected an integer of at least 0")
        if (self.kind == "window") != (self.window > 0):
            raise PlanError(
                f"window is {self.window} with kind {self.kind!r}; a window (and only a window) has one > 0"
            )
        if self.kind == "exact" and self.sinks:
            raise PlanError(f"sinks is {self.sinks} with kind 'exact', which keeps all keys; expected 0")
        if not isinstance(self.mass, (int, float)) or isinstance(self.mass, bool) or math.isnan(self.mass):
            raise PlanError(f"mass is {self.mass!r}, expected a share in (0, 1)")
        if (self.kind == "blocks") != (0.0 < self.mass < 1.0) or not 0.0 <= self.mass < 1.0:
            raise PlanError(
                f"mass is {self.mass} with kind {self.kind!r}; blocks (and only blocks) have one in (0, 1)"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the choice computes the stock function in the model's dtype."""
        return self.kind == "exact" and self.rank == 0 and self.precision == "model"

    @property
    def label(self) -> str:
        """A short name, for tables: `exact`, `w1024+16 bf16`, `p0.95 r32`."""
        parts: list[str] = []
        if self.kind == "window":
            parts.append(f"w{self.window}+{self.sinks}")
        elif self.kind == "blocks":
            parts.append(f"p{self.mass:g}")
        if self.rank:
            parts.append(f"r{self.rank}")
        if self.precision != "model":
            parts.append(self.precision)
        return " ".join(parts) or "exact"

    @classmethod
    def from_dict(cls, data: Any, where: str = "choice") -> Choice:
        """Returns the choice written by `asdict`.

        Raises:
            PlanError: If a key is unknown or a value is out of range.
        """
        return cls(**read_record(cls, data, where))


EXACT = Choice()


@dataclass(frozen=True)
class LayerPlan:
    """The choices of one attention layer, one per key/value head.

    Attributes:
        layer: Index of the layer, as the attention module's `layer_idx`.
        weights: Hash of the attention module's weights; see `attach.weight_hash`.
        choices: One choice per key/value head.
    """

    layer: int
    weights: str
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not _is_int(self.layer) or self.layer < 0:
            raise PlanError(f"layer is {self.layer!r}, expected an index of at least 0")
        if not self.choices:
            raise PlanError(f"layer {self.layer} has no choices, expected one per key/value head")

    @property
    def is_exact(self) -> bool:
        """Whether no head of the layer is approximated."""
        return all(choice.is_exact for choice in self.choices)

    @classmethod
    def from_dict(cls, data: Any, where: str = "layer") -> LayerPlan:
        """Returns the layer plan written by `asdict`."""
        kwargs = read_record(cls, data, where)
        kwargs["choices"] = tuple(
            Choice.from_dict(item, f"{where}.choices[{index}]")
            for index, item in enumerate(kwargs["choices"])
        )
        return cls(**kwargs)


@dataclass(frozen=True)
class UnitRecord:
    """Why a unit got its choice.

    Attributes:
        layer: Layer index.
        head: Key/value head.
        risk: Predicted loss in nats/token of the choice, at the length bin where it is largest.
        price: Measured seconds of the choice over a prefill of every length with its decode steps; heads of a
            launch share its fixed cost.
        exact_price: The same of the exact choice.
        dropped_mass: Mean attention weight that the choice leaves out, on calibration rows.
        dropped_mass_p95: Its 95th percentile; the run-time monitor tightens beyond three times this.
        dropped_square: Mean square of it: risk / dropped_square turns a dropped mass seen at run time into a
            KL.
    """

    layer: int
    head: int
    risk: float
    price: float
    exact_price: float
    dropped_mass: float
    dropped_mass_p95: float
    dropped_square: float


@dataclass(frozen=True)
class Verified:
    """What held-out text said about the plan.

    Attributes:
        passed: Whether every gate was passed.
        delta_nll: Mean paired difference plan - stock, nats/token.
        upper: One-sided upper confidence bound of it, clustered by document.
        confidence: Its level, after division by the number of tries.
        tries: How many plans had been verified, this one counted.
        documents: Held-out documents.
        tokens: Scored tokens.
        kl: Mean KL(stock || plan), nats/token.
        kl_p999: Its 99.9th percentile.
        top1: Share of tokens where both agree on the likeliest token.
        retrieval_stock: Share of needles that stock attention retrieves; `None` where none were asked for, as of
            models that generate nothing.
        retrieval_plan: Share of needles that the plan retrieves.
        activation: Share of (token, query head) pairs that the plan computes otherwise than stock.
        activation_keys: Share of them that see fewer keys: what perplexity on short text cannot test.
        predicted_kl: The sum of the risks, re-scaled.
        sentence: The verdict in words.
    """

    passed: bool
    delta_nll: float
    upper: float
    confidence: float
    tries: int
    documents: int
    tokens: int
    kl: float
    kl_p999: float
    top1: float
    retrieval_stock: float | None
    retrieval_plan: float | None
    activation: float
    activation_keys: float
    predicted_kl: float
    sentence: str


@dataclass(frozen=True)
class Plan:
    """Everything decided for one model, and what it was decided from.

    Attributes:
        format: Version of this record.
        model_type: `config.model_type` of the calibrated model.
        weight_hash: Hash of the hashes of all attention modules, those of exact layers too.
        dtype: Dtype of the weights, `float32` and so on.
        adaattn: Version of this package.
        torch: Version of torch.
        transformers: Version of transformers.
        budget: Allowed loss, nats/token.
        seed: Seed of every random choice.
        data_fingerprint: Hash of the calibration and verification text.
        protocol: Words and numbers that say how it was measured.
        lengths: Length bins in tokens, rising; beyond the last one every layer is exact.
        layers: One plan per layer that is not exact throughout; absent layers are exact.
        units: Risk and price of each unit of the layers above.
        verified: The verdict on held-out text, or `None` for a plan that was not verified.
        tensors: Hash of the safetensors file of bases and means, empty without one.
    """

    format: int
    model_type: str
    weight_hash: str
    dtype: str
    adaattn: str
    torch: str
    transformers: str
    budget: float
    seed: int
    data_fingerprint: str
    protocol: dict[str, Any]
    lengths: tuple[int, ...]
    layers: tuple[LayerPlan, ...]
    units: tuple[UnitRecord, ...]
    verified: Verified | None
    tensors: str

    def __post_init__(self) -> None:
        if self.format != PLAN_FORMAT:
            raise PlanError(
                f"plan format is {self.format!r}, this version reads {PLAN_FORMAT}; calibrate again"
            )
        if list(self.lengths) != sorted(set(self.lengths)) or any(length < 1 for length in self.lengths):
            raise PlanError(f"lengths are {list(self.lengths)}, expected rising positive numbers")
        indices = [layer.layer for layer in self.layers]
        if indices != sorted(set(indices)):
            raise PlanError(f"layers are {indices}, expected rising indices, each once")

    @property
    def max_length(self) -> int:
        """Longest sequence that the plan speaks for; 0 when it speaks for none."""
        return self.lengths[-1] if self.lengths else 0

    @property
    def is_exact(self) -> bool:
        """Whether the plan changes nothing."""
        return all(layer.is_exact for layer in self.layers)

    def layer(self, index: int | None) -> LayerPlan | None:
        """Returns the plan of a layer, `None` where it is exact."""
        for plan in self.layers:
            if plan.layer == index:
                return None if plan.is_exact else plan
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data, lists for tuples."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Returns the plan written by `to_dict`.

        Raises:
            PlanError: If a key is unknown or missing, the format is another, or a value is out of range.
        """
        if isinstance(data, Mapping) and data.get("format") != PLAN_FORMAT:
            raise PlanError(
                f"plan format is {data.get('format')!r}, this version reads {PLAN_FORMAT}; calibrate again"
            )
        kwargs = read_record(cls, data, "plan")
        kwargs["lengths"] = tuple(kwargs["lengths"])
        kwargs["layers"] = tuple(
            LayerPlan.from_dict(item, f"layers[{index}]") for index, item in enumerate(kwargs["layers"])
        )
        kwargs["units"] = tuple(
            UnitRecord(**read_record(UnitRecord, item, f"units[{index}]"))
            for index, item in enumerate(kwargs["units"])
        )
        if kwargs["verified"] is not None:
            kwargs["verified"] = Verified(**read_record(Verified, kwargs["verified"], "verified"))
        return cls(**kwargs)

    def to_json(self) -> str:
        """Returns the plan as JSON, byte for byte the same for equal plans."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan written by `to_json`.

        Raises:
            PlanError: If the text is not JSON, or not a plan.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        return cls.from_dict(data)
