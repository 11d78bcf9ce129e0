"""The plan, as data: what attention computes per layer and key/value head; decided once, stored with a checkpoint.

A plan is fixed and does not depend on the values of a call. What a row computes is a function of its query and of the
keys that its mask shows, so that a plan neither leaks future tokens into earlier ones nor couples the examples of a
batch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .._files import parse_json, printable
from ..attention.stored import FORMATS
from .choices import EXACT, Choice
from .evidence import MODEL, MOST_HEADS, MOST_LAYERS, UnitRecord, Verified
from .record import PlanError, read_list, read_record, real, share, text, whole
from .store import PlanFiles
from .wording import allowed

__all__ = ["EXACT", "MOST_HEADS", "PLAN_FORMAT", "Choice", "LayerPlan", "Plan", "PlanError", "UnitRecord", "Verified"]

PLAN_FORMAT = 2
WHOLE = "model:"
"""Prefix of hashes over all weights of a model, not just those of attention."""
MOST_LENGTHS = 1 << 10
"""More length bins than any plan has."""
MOST_UNITS = 1 << 16
"""More units than any model has: key/value heads of all its layers."""


@dataclass(frozen=True)
class LayerPlan:
    """The choices of one attention layer, one per key/value head.

    Attributes:
        layer: Index of the layer, as the attention module's `layer_idx`.
        weights: Hash of the attention module's weights and buffers; see `hashes.weight_hash`.
        choices: One choice per key/value head.
    """

    layer: int
    weights: str
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        whole(self.layer, "layer", most=MOST_LAYERS)
        text(self.weights, f"weights of layer {self.layer}")
        if not self.choices:
            raise PlanError(f"layer {self.layer} has no choices, expected one per key/value head")
        if len(self.choices) > MOST_HEADS:
            raise PlanError(
                f"layer {self.layer} has {len(self.choices)} choices, expected one per key/value head, "
                f"at most {MOST_HEADS}"
            )

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
            for index, item in enumerate(read_list(kwargs["choices"], f"{where}.choices", MOST_HEADS))
        )
        return cls(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the layer plan as JSON data."""
        choices = [choice.to_dict() for choice in self.choices]
        return {"layer": self.layer, "weights": self.weights, "choices": choices}


@dataclass(frozen=True)
class Plan(PlanFiles):
    """The choices for one model, and how they were found.

    Attributes:
        format: Version of this record.
        model_type: `config.model_type` of the calibrated model.
        weight_hash: `model:` and the hash of all weights of the model without its head; see `hashes.model_hash`.
        configuration: The settings of the model's configuration by which it computes; see `configured.computes_by`.
        dtype: Dtype of the weights, `float32` and so on.
        adaattn: Version of this package.
        torch: Version of torch.
        transformers: Version of transformers.
        budget: Allowed loss, nats/token.
        seed: Seed of every random choice.
        data_fingerprint: Hash of the calibration and verification text.
        protocol: How the plan was measured and verified.
        lengths: Length bins in tokens, rising; tokens that see more keys than the last one are exact.
        layers: The layers that are not exact; all others are.
        units: Risk and price of each unit of the layers above.
        verified: The verdict on held-out text, or `None` for a plan that was not verified.
        tensors: Hash of the safetensors file of bases and means, empty without one.
        attention_layers: Indices of all attention layers of the model, rising; empty where they are not recorded.
    """

    format: int
    model_type: str
    weight_hash: str
    configuration: dict[str, Any]
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
    attention_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.format) is not int or self.format != PLAN_FORMAT:
            raise PlanError(f"plan format is {self.format!r:.60}, this version reads {PLAN_FORMAT}; calibrate again")
        for name in ("model_type", "weight_hash", "dtype", "adaattn", "torch", "transformers"):
            text(getattr(self, name), name)
        text(self.data_fingerprint, "data_fingerprint")
        text(self.tensors, "tensors")
        if not self.weight_hash.startswith(WHOLE):
            raise PlanError(
                f"weight_hash is {self.weight_hash!r:.60}, expected {WHOLE!r} and the hash of all weights of the "
                "model; calibrate again"
            )
        real(self.budget, "budget", 0.0)
        whole(self.seed, "seed", least=-(1 << 63), most=1 << 64)
        for name in ("configuration", "protocol"):
            if not isinstance(getattr(self, name), Mapping):
                raise PlanError(f"{name} is {type(getattr(self, name)).__name__}, expected a mapping")
        if not self.configuration:
            raise PlanError("configuration is empty, expected the model's settings; calibrate again")
        self._check_protocol()
        if self.verified is not None and self.verified.passed and self.verified.upper > self.budget:
            raise PlanError(
                f"verified.passed is true with an upper bound of {self.verified.upper!r} nats/token, above the "
                f"budget of {self.budget!r}: the plan contradicts its own verification; calibrate again"
            )
        if len(self.lengths) > MOST_LENGTHS or len(self.layers) > MOST_LAYERS:
            raise PlanError(
                f"plan: got {len(self.lengths)} lengths and {len(self.layers)} layers, expected at most "
                f"{MOST_LENGTHS} and {MOST_LAYERS}"
            )
        for length in self.lengths:
            whole(length, "lengths", least=1)
        if list(self.lengths) != sorted(set(self.lengths)):
            raise PlanError(f"lengths are {list(self.lengths)}, expected rising positive numbers")
        for index in self.attention_layers:
            whole(index, "attention_layers", most=MOST_LAYERS)
        indices = [layer.layer for layer in self.layers]
        for name, rising in (("layers", indices), ("attention_layers", list(self.attention_layers))):
            if rising != sorted(set(rising)):
                raise PlanError(f"{name} are {rising}, expected rising indices, each once")
        if self.attention_layers and not set(indices) <= set(self.attention_layers):
            raise PlanError(
                f"layers are {indices}, expected some of the model's {list(self.attention_layers)}; calibrate again"
            )

    def _check_protocol(self) -> None:
        """Refuses entries of the protocol that are read and malformed."""
        settings = self.protocol.get("settings", {})
        if not isinstance(settings, Mapping):
            raise PlanError(f"protocol.settings is {type(settings).__name__}, expected a mapping")
        if settings.get("alpha") is not None:
            share(settings["alpha"], "protocol.settings.alpha")
        _ = self.cache, self.exact_steps

    @property
    def predicted_loss(self) -> float:
        """The sum of the risks, nats/token."""
        return sum(unit.risk for unit in self.units)

    @property
    def cache(self) -> tuple[str, bool] | None:
        """Format of the cache that the plan was verified with, and whether its heads stream; None without one.

        Raises:
            PlanError: The protocol's entry is malformed.
        """
        found = self.protocol.get("cache")
        if found is None:
            return None
        known = ("model", *FORMATS)
        if (
            not isinstance(found, Mapping)
            or not isinstance(found.get("streaming"), bool)
            or found.get("stored") not in known
        ):
            raise PlanError(
                f"protocol.cache is {found!r:.120}, expected a mapping with stored, one of {', '.join(known)}, and "
                "streaming, true or false"
            )
        return found["stored"], found["streaming"]

    @property
    def exact_steps(self) -> bool:
        """Whether decode steps are exact: where the plan was made, no choice was faster than exact attention there.

        Raises:
            PlanError: The protocol's entry is malformed.
        """
        found = self.protocol.get("decode")
        if found not in (None, "exact"):
            raise PlanError(f"protocol.decode is {found!r:.60}, expected 'exact' or no such entry")
        return found is not None

    @property
    def max_length(self) -> int:
        """Longest sequence that the plan covers; 0 if it covers none."""
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
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["layers"] = [layer.to_dict() for layer in self.layers]
        data["units"] = [asdict(unit) for unit in self.units]
        data["verified"] = None if self.verified is None else asdict(self.verified)
        plain: dict[str, Any] = json.loads(json.dumps(data))
        return plain

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Returns the plan written by `to_dict`; PlanError for another format, other keys, or a value out of range."""
        if isinstance(data, Mapping) and data.get("format") != PLAN_FORMAT:
            raise PlanError(
                f"plan format is {data.get('format')!r:.60}, this version reads {PLAN_FORMAT}; calibrate again"
            )
        kwargs = read_record(cls, data, "plan")
        kwargs["attention_layers"] = tuple(read_list(kwargs["attention_layers"], "attention_layers", MOST_LAYERS))
        kwargs["lengths"] = tuple(read_list(kwargs["lengths"], "lengths", MOST_LENGTHS))
        kwargs["layers"] = tuple(
            LayerPlan.from_dict(item, f"layers[{index}]")
            for index, item in enumerate(read_list(kwargs["layers"], "layers", MOST_LAYERS))
        )
        kwargs["units"] = tuple(
            UnitRecord(**read_record(UnitRecord, item, f"units[{index}]"))
            for index, item in enumerate(read_list(kwargs["units"], "units", MOST_UNITS))
        )
        if kwargs["verified"] is not None:
            kwargs["verified"] = Verified(**read_record(Verified, kwargs["verified"], "verified"))
        return cls(**kwargs)

    def to_json(self) -> str:
        """Returns the plan as JSON, byte for byte the same for equal plans."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def card(self, repository: str) -> str:
        """Returns the model card of a directory or repository that holds the plan: whose it is, and what was proven."""
        model = printable(str(self.protocol.get(MODEL, self.model_type)))
        verdict = "It was never verified on held-out text." if self.verified is None else self.verified.sentence
        lengths = ", ".join(f"{length:,}" for length in self.lengths) or "none"
        scoring = self.protocol.get("scoring")
        masked = isinstance(scoring, Mapping) and "mask_share" in scoring
        auto = f"AutoModelFor{'Masked' if masked else 'Causal'}LM"
        of_hub = f"base_model: {json.dumps(model)}\n" if model.count("/") == 1 else ""
        return f"""---
library_name: adaattn-hf
{of_hub}tags:
- adaattn
- attention-plan
---

# A plan of attention for {model}

What each head of the model reads, and in which precision, within a budget of {allowed(self.budget)} perplexity.
{printable(verdict)}

* It speaks for up to {self.max_length:,} tokens, and was measured at {lengths}; what is longer is computed exactly.
* It belongs to these weights in {printable(self.dtype)}: other weights, dtypes and settings are refused.
* Its versions: adaattn-hf {printable(self.adaattn)}, torch {printable(self.torch)}, transformers
  {printable(self.transformers)}.

```python
from transformers import {auto}

import adaattn_hf

model = {auto}.from_pretrained({model!r}, dtype={self.dtype!r}, attn_implementation="adaattn")
adaattn_hf.load_plan(model, {repository!r})
```

To measure it on text of your own, beside stock attention:

```bash
adaattn eval {shlex.quote(model)} --plan {shlex.quote(repository)} --dtype {shlex.quote(self.dtype)} --data TEXT
```
"""

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan written by `to_json`. Raises PlanError if the text is not JSON, or not a plan."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        return cls.from_dict(data)
