"""A cache layer in which each head keeps only what its plan reads: a window and the first tokens, or all tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from adaattn_hf.plans.plan import LayerPlan, Plan

from ..plans.attach import plan_of
from .carrier import StoredTensor
from .growing import GROWTH
from .kept import Whole, negative, refuse_assigned, room_for, same_rows
from .ring import Read, Ring, some_heads
from .tokens import SMOOTHED, StoredTokens, Tokens

if TYPE_CHECKING:
    from adaattn_hf.attention.request import AttentionRequest

Spans = tuple["tuple[int, int] | None", ...]
"""Window and sinks of each key/value head of a layer, None where it keeps everything."""


def spans_of(model: PreTrainedModel, plan: Plan | None = None) -> dict[int, Spans]:
    """Returns what heads keep by the model's plan (or by `plan`), for each layer in which some keep less than all.

    Raises:
        ValueError: The model has no plan, or none with windows.
    """
    plan = plan_of(model) if plan is None else plan
    found: dict[int, Spans] = {}
    for layer in () if plan is None else plan.layers:
        spans = spans_in(layer)
        if any(spans):
            found[layer.layer] = spans
    if not found:
        raise ValueError(
            f"streaming: got True for {type(model).__name__} {'without a plan' if plan is None else 'and its plan'}, "
            "expected a plan with windows (adaattn calibrate MODEL --families window); heads without a window keep "
            "everything, so leave streaming out"
        )
    return found


def spans_in(layer: LayerPlan) -> Spans:
    """What each head keeps by a layer's plan; windows of less than 16 tokens save nothing."""
    spans = (choice.span for choice in layer.choices)
    return tuple(span if span is not None and span[0] >= SMOOTHED else None for span in spans)


class StreamedTensor(StoredTensor):
    """Stands for keys or values of a `StreamingLayer`, whose heads keep different numbers of tokens: no one tensor."""

    def __init__(self, surface: Tensor, layer: StreamingLayer | None = None) -> None:
        """Of the shape of all tokens.

        Args:
            surface: Has that shape, by strides of zero, and no memory for it.
            layer: Holds the tokens, for the attention that is handed this. The layer's own `keys` and `values` leave it
                out, since a layer that refers to itself would be freed late.
        """
        super().__init__(surface, None, surface.shape[3], surface.dtype)
        self.streams = layer


class StreamingLayer(Whole, DynamicLayer):
    """A layer of full attention; heads that keep the same window and first tokens share storage."""

    def __init__(
        self,
        stored: str,
        spans: Spans,
        reserve: int = 0,
        growth: float = GROWTH,
        max_cache_len: int | None = None,
    ) -> None:
        """`stored` is one of `CACHES`; `spans` says what each key/value head keeps; the rest as in `AdaAttnCache`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored, self.spans = stored, spans
        self.set_room(reserve, growth, max_cache_len)
        self.record_past = False
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.groups: list[tuple[tuple[int, ...], Ring | Tokens]] = []
        self.count = 0
        self.starts: tuple[int, ...] | None = None
        self.fresh: tuple[Tensor, Tensor] | None = None
        self.program: int | None = None
        self.keys = self.values = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these.

        Raises:
            ValueError: The plan is for another number of heads.
        """
        if key_states.shape[1] != len(self.spans):
            raise ValueError(
                f"cache: the plan is for {len(self.spans)} key/value heads, got keys with {key_states.shape[1]}; "
                "calibrate the model in the form in which it runs"
            )
        self.dtype, self.device = key_states.dtype, key_states.device
        heads: dict[tuple[int, int] | None, list[int]] = {}
        for head, span in enumerate(self.spans):
            heads.setdefault(span, []).append(head)
        for span, own in heads.items():
            like = some_heads(key_states, own)[:, :, :0], some_heads(value_states, own)[:, :, :0]
            most = None if span is None else sum(span)
            reserve = self.reserve if most is None else min(self.reserve, most)
            tokens = (
                Tokens(*like, reserve, self.growth, most)
                if self.stored == "model"
                else StoredTokens(*like, self.stored, reserve, self.growth, most)
            )
            self.groups.append((tuple(own), tokens if span is None else Ring(tokens, *span)))
        self.is_initialized = True

    def attend(
        self, module: nn.Module, request: AttentionRequest, forced: str | None, wanted: bool
    ) -> Tensor:
        """What the layer's plan computes over its tokens; see `streams.attend_streams`."""
        from .streams import attend_streams  # imported here: a cache is made without what runs plans

        return attend_streams(module, request, self, forced, wanted)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take `[batch, num_kv_heads, n, head_dim]`; the attention of this call stores and reads it (`read`).

        Raises:
            RuntimeError: A gradient is wanted, or no attention has read the tokens before these.
            ValueError: `max_cache_len` is passed.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError(
                "cache: keys that are dropped have no gradient; call the model under torch.no_grad(), or train with "
                "use_cache=False"
            )
        if self.fresh is not None:
            raise RuntimeError(
                "cache: the tokens before these were never attended to; a cache with streaming=True serves models "
                "whose every layer hands its keys to attention"
            )
        total = self.count + key_states.shape[2]
        room_for(self.limit, total)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys is not None:
            refuse_assigned(self.keys, StreamedTensor)
            same_rows(self.keys.shape[0], key_states)
        self.count, self.fresh = total, (key_states, value_states)
        self._show(key_states, value_states)
        return (
            StreamedTensor(self.keys.codes, self),
            StreamedTensor(self.values.codes, self),
        )

    def read(
        self, starts: tuple[int, ...], queries: Tensor | None = None
    ) -> list[tuple[tuple[int, ...], Ring | Tokens, Read]]:
        """Write what `update` took; returns of each group its heads, its storage and what this call reads.

        Args:
            starts: Position of the first real token of each row, the number of tokens where all are padding.
            queries: Those of a prompt: keys are rounded so that scores with queries like these change least.

        Raises:
            ValueError: A row begins elsewhere than it did, and what its heads read is gone.
        """
        assert self.fresh is not None  # `attend_streams` has checked it
        keys, values = self.fresh
        past = self.count - keys.shape[2]
        gone = any(isinstance(store, Ring) and not store.whole for _, store in self.groups)
        if gone and any(
            old != new and min(old, new) < past for old, new in zip(self.starts or (), starts, strict=True)
        ):
            raise ValueError(
                f"attention_mask: its rows begin at {starts}, expected {self.starts} as before, since streaming heads "
                "keep the first tokens of each row; pass the mask of the whole sequence in every call"
            )
        self.starts, self.fresh = starts, None
        read: list[tuple[tuple[int, ...], Ring | Tokens, Read]] = []
        for heads, store in self.groups:
            own = some_heads(keys, heads), some_heads(values, heads)
            tokens = store.tokens if isinstance(store, Ring) else store
            if not past and queries is not None:
                tokens.expect(queries.unflatten(1, (keys.shape[1], -1))[:, list(heads)].flatten(1, 2))
            if isinstance(store, Ring):
                read.append((heads, store, store.append(*own, starts, self.record_past)))
            else:
                store.append(*own)
                read.append((heads, store, store.read(store.views())))
        return read

    def withdraw(self) -> None:
        """Take back the last `update`, whose attention was refused."""
        if self.fresh is not None:
            self.count -= self.fresh[0].shape[2]
            self._show(*self.fresh)
            self.fresh = None

    def fits(self, plan: LayerPlan) -> bool:
        """Whether the heads keep exactly what this plan lets them read."""
        return spans_in(plan) == self.spans

    def _show(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = (
            StreamedTensor(like.new_empty(1).expand(*like.shape[:2], self.count, like.shape[3]))
            for like in (keys, values)
        )

    def get_seq_length(self) -> int:
        """Tokens seen, those that no head keeps any more counted."""
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of the room of all groups."""
        return sum(tokens.nbytes for tokens in self.kept())

    def kept(self) -> list[Tokens]:
        """The tokens of each group of heads."""
        return [store.tokens if isinstance(store, Ring) else store for _, store in self.groups]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; the count is negative, as in Transformers.

        Raises:
            RuntimeError: Heads have forgotten tokens that they would read then.
        """
        negative(tokens_to_remove)
        if not self.groups:
            return
        for _, store in self.groups:
            if isinstance(store, Ring) and not store.can_crop(-tokens_to_remove):
                raise RuntimeError(
                    f"crop: heads of this layer keep {store.sinks} first tokens and the last {store.window} of "
                    f"{self.count}, what they would read after it is gone; call activate_past_recording() before the "
                    "tokens that may have to be taken back, or use a cache with streaming=False"
                )
        for _, store in self.groups:
            store.crop(-tokens_to_remove)
        self.count += tokens_to_remove
        self._show(self.keys.codes[:, :, :1], self.values.codes[:, :, :1])

    def activate_past_recording(self) -> None:
        """From now to the next `crop`, keep what it may have to bring back; assisted decoding calls this."""
        self.record_past = True

    def look(self) -> None:
        """`keys` and `values` have a shape and no memory; only a change of rows changes them, see `_rows`."""

    def let_go(self) -> None:
        """They are views of no storage."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        if self.groups:
            super().batch_select_indices(indices)
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self._rows([int(row) for row in rows.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.groups:
            super().batch_repeat_interleave(repeats)
            self._rows([row for row in range(self.keys.shape[0]) for _ in range(repeats)])

    def _rows(self, rows: Sequence[int]) -> None:
        if self.starts is not None:
            self.starts = tuple(self.starts[row] for row in rows)
        for _, store in self.groups:
            if isinstance(store, Ring):
                store.commit()  # what was recorded for `crop` belongs to the rows as they were
        self._show(*(t.codes[:1, :, :1].expand(len(rows), -1, -1, -1) for t in (self.keys, self.values)))

    def held(self) -> dict[str, Tensor]:
        """All tensors of the storage, by group and name; `take` puts them into an empty layer."""
        found = {"starts": torch.tensor(self.starts, dtype=torch.int64, device="cpu")}
        for group, tokens in enumerate(self.kept()):
            found |= {f"{group}.{name}": tensor for name, tensor in tokens.held().items()}
        return found

    def take(self, held: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> None:
        """Fill this empty layer with what `held` gave, of `count` tokens seen."""
        widths = [self.spans.count(span) for span in dict.fromkeys(self.spans)]
        parts = [
            {n.partition(".")[2]: t for n, t in held.items() if n.startswith(f"{g}.")}
            for g in range(len(widths))
        ]
        first = parts[0]
        keys = first["keys" if "keys" in first else "key_codes"]
        values = first["values" if "values" in first else "value_codes"]
        dim_v = values.shape[3] * (2 if values.dtype is torch.uint8 else 1)
        like = [
            torch.empty((keys.shape[0], len(self.spans), 1, size), dtype=dtype, device=keys.device)
            for size in (keys.shape[3], dim_v)
        ]
        self.lazy_initialization(*like)
        for part, (_, store) in zip(parts, self.groups, strict=True):
            if isinstance(store, Ring):
                store.count = count
                store.tokens.take(part)
            else:
                store.take(part)
        self.count, self.starts = count, tuple(held["starts"].tolist())
        self._show(*like)


def stream(cache: Cache, stored: str, spans: Mapping[int, Spans], **room: Any) -> Cache:
    """Replace the layers of full attention that have spans by streaming layers; returns the cache."""
    # a cache without a configuration makes each layer when its first token comes
    while len(cache.layers) <= max(spans):
        made: Any = cache.layer_class_to_replicate
        cache.layers.append(made())
    for index, own in spans.items():
        if type(cache.layers[index]) is DynamicLayer:
            cache.layers[index] = StreamingLayer(stored, own, **room)
    return cache
