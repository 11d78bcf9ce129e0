"""The plan, as data: what attention computes per layer and key/value head; decided once, stored with a checkpoint.

A plan is fixed and does not depend on the values of a call. What a row computes is a function of its query and of the
keys that its mask shows, so that a plan neither leaks future tokens into earlier ones nor couples the examples of a
batch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from .._files import parse_json, write_atomically
from ..attention.stored import CACHE_FORMATS
from . import store
from .card import card
from .choices import EXACT, Choice
from .limits import MOST_HEADS, MOST_LAYERS, Amount, Index, UnitRecord, Verified
from .record import LARGEST, PlanError, read, read_fields, read_record

__all__ = ["EXACT", "MOST_HEADS", "PLAN_FORMAT", "Choice", "LayerPlan", "Plan", "PlanError", "UnitRecord", "Verified"]

PLAN_FORMAT = 2
WHOLE = "model:"
"""Prefix of hashes over all weights of a model, not just those of attention."""
Length = Annotated[int, (1, LARGEST)]
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

    layer: Index
    weights: str
    choices: Annotated[tuple[Choice, ...], MOST_HEADS]

    def __post_init__(self) -> None:
        read_fields(self)
        if not self.choices:
            raise PlanError(f"layer {self.layer} has no choices, expected one per key/value head")

    @property
    def is_exact(self) -> bool:
        """Whether no head of the layer is approximated."""
        return all(choice.is_exact for choice in self.choices)

    def to_dict(self) -> dict[str, Any]:
        """Returns the layer plan as JSON data."""
        choices = [choice.to_dict() for choice in self.choices]
        return {"layer": self.layer, "weights": self.weights, "choices": choices}


@dataclass(frozen=True)
class Plan:
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
    configuration: Mapping[str, Any]
    dtype: str
    adaattn: str
    torch: str
    transformers: str
    budget: Amount
    seed: Annotated[int, (-(1 << 63), 1 << 64)]
    data_fingerprint: str
    protocol: Mapping[str, Any]
    lengths: Annotated[tuple[Length, ...], MOST_LENGTHS]
    layers: Annotated[tuple[LayerPlan, ...], MOST_LAYERS]
    units: Annotated[tuple[UnitRecord, ...], MOST_UNITS]
    verified: Verified | None
    tensors: str
    attention_layers: Annotated[tuple[Index, ...], MOST_LAYERS]

    def __post_init__(self) -> None:
        read_fields(self)
        if not self.weight_hash.startswith(WHOLE):
            raise PlanError(
                f"weight_hash is {self.weight_hash!r:.60}, expected {WHOLE!r} and the hash of all weights of the "
                "model; calibrate again"
            )
        if not self.configuration:
            raise PlanError("configuration is empty, expected the model's settings; calibrate again")
        for name in ("settings", "scoring"):
            read(self.protocol.get(name, {}), Mapping[str, Any], f"protocol.{name}")
        _ = self.exact_steps  # refused where it is malformed
        for name, proof in (("verified", self.verified), ("protocol.cache.verified", self.cache_verified)):
            if proof is not None and proof.passed and proof.upper > self.budget:
                raise PlanError(
                    f"{name}.passed is true with an upper bound of {proof.upper!r} nats/token, above the budget of "
                    f"{self.budget!r}: the plan contradicts its own verification; calibrate again"
                )
        indices, layers = [layer.layer for layer in self.layers], list(self.attention_layers)
        for name, rising in (("lengths", list(self.lengths)), ("layers", indices), ("attention_layers", layers)):
            if rising != sorted(set(rising)):
                raise PlanError(f"{name} are {rising!s:.200}, expected rising numbers, each once")
        if layers and not set(indices) <= set(layers):
            raise PlanError(
                f"layers are {indices!s:.200}, expected some of the model's {layers!s:.200}; calibrate again"
            )

    def __hash__(self) -> int:
        """Equal plans have equal hashes; the mappings of a plan have none."""
        return hash((self.weight_hash, self.budget, self.lengths, self.layers, self.tensors, self.verified))

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
        cache = self.protocol.get("cache")
        if cache is None:
            return None
        if (
            not isinstance(cache, Mapping)
            or not isinstance(cache.get("streaming"), bool)
            or cache.get("stored") not in CACHE_FORMATS
        ):
            raise PlanError(
                f"protocol.cache is {cache!r:.120}, expected a mapping with stored, one of {', '.join(CACHE_FORMATS)}, "
                "and streaming, true or false"
            )
        return cache["stored"], cache["streaming"]

    @property
    def cache_verified(self) -> Verified | None:
        """The verdict of held-out text on the plan over its cache, None without one; PlanError if it is malformed."""
        verdict = None if self.cache is None else self.protocol["cache"].get("verified")
        proof: Verified | None = read(verdict, Verified | None, "protocol.cache.verified")
        return proof

    @property
    def exact_steps(self) -> bool:
        """Whether decode steps are exact: where the plan was made, no choice was faster than exact attention there.

        Raises:
            PlanError: The protocol's entry is malformed.
        """
        steps = self.protocol.get("decode")
        if steps not in (None, "exact"):
            raise PlanError(f"protocol.decode is {steps!r:.60}, expected 'exact' or no such entry")
        return steps is not None

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
        data = asdict(self) | {"layers": [layer.to_dict() for layer in self.layers]}
        return dict(json.loads(json.dumps(data)))

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Returns the plan written by `to_dict`; PlanError for another format, other keys, or a value out of range."""
        form = data.get("format") if isinstance(data, Mapping) else PLAN_FORMAT
        if type(form) is not int or form != PLAN_FORMAT:
            raise PlanError(f"plan format is {form!r:.60}, this version reads {PLAN_FORMAT}; calibrate again")
        return read_record(cls, data)

    def to_json(self) -> str:
        """Returns the plan as JSON, byte for byte the same for equal plans."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan written by `to_json`. Raises PlanError if the text is not JSON, or not a plan."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PlanError(f"the plan is not JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_pretrained(cls, source: Plan | str | Path) -> Plan:
        """Returns the plan in a file, a directory or a repository of the Hub; a plan is returned as it is.

        In a directory or repository it lies in `adaattn_plan.json`, or else in the `config.json` of a model that
        carries it. The tensors that lie beside it are read, too.

        Args:
            source: Path of a file or directory, id of a repository (`owner/name`), or a plan.

        Raises:
            PlanError: There is no plan, or none that can be read, or its tensors are others than it names.
            TypeError: The source is something else.
        """
        if isinstance(source, cls):
            return source
        if not isinstance(source, (str, Path)):
            raise TypeError(
                f"plan: got {type(source).__name__}, expected a Plan, its file or directory, or an id of the Hub; read "
                "other data with Plan.from_dict"
            )
        file = store.plan_file(source)
        settings = store.carried_in(file) if file.name == store.CONFIG_FILE else {}
        if settings:
            plan = cls.from_dict(settings[store.CONFIG_KEY])
        else:
            try:
                plan = cls.from_json(store.text_file(file))
            except PlanError as error:
                raise PlanError(f"{file}: {error}; expected the adaattn_plan.json of `adaattn calibrate`") from error
        if plan.tensors:
            store.read_tensors(plan.tensors, source, settings)
        return plan

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the plan, its tensors and, where there is no README.md, a card to a directory.

        Raises:
            PlanError: Its tensors are not in memory.
        """
        folder, data = Path(directory), self.tensor_bytes()
        if data is not None:
            write_atomically(folder / store.TENSORS_FILE, data)
        write_atomically(folder / store.PLAN_FILE, self.to_json())
        if not (folder / store.CARD_FILE).exists():
            write_atomically(folder / store.CARD_FILE, card(self, str(directory)))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Uploads the plan, its tensors and a card to a repository of the Hub, which is made where there is none.

        The card of a repository that holds a model stays.

        Args:
            repo_id: `owner/name`.
            private: Whether a new repository is private; None for the owner's default.
            token: Token of the Hub; None for the one that is logged in.

        Returns:
            The address of the commit.

        Raises:
            PlanError: Its tensors are not in memory.
        """
        with tempfile.TemporaryDirectory() as folder:
            write_atomically(Path(folder, store.CARD_FILE), card(self, repo_id))
            self.save_pretrained(folder)
            return store.upload(folder, repo_id, private, token)

    def tensor_bytes(self) -> bytes | None:
        """Returns a plan's safetensors file, `None` for a plan without; PlanError if its tensors are not in memory."""
        return store.file_of(store.tensors_of(self.tensors)) if self.tensors else None
