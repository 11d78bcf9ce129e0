"""A cache layer in which each head keeps only what its plan reads: a window and the first tokens, or all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaattn_hf.plans.plan import LayerPlan, Plan

from ..plans.attach import plan_of
from .carrier import StoredTensor
from .groups import HeadGroup, Read, Span, some_heads
from .layers import FullLayer, negative, refuse_gradients, room_for, same_rows
from .tokens import SMOOTHED, Tokens, numbers_like

if TYPE_CHECKING:
    from adaattn_hf.attention.request import AttentionRequest

Spans = tuple["Span | None", ...]
"""Of each key/value head of a layer, None where it keeps everything."""


def spans_of(model: PreTrainedModel, plan: Plan | None = None) -> dict[int, Spans]:
    """Returns what heads keep by a plan, for each layer where some keep less than all; ValueError without windows."""
    plan = plan_of(model) if plan is None else plan
    found = {} if plan is None else {layer.layer: spans_in(layer) for layer in plan.layers}
    found = {layer: spans for layer, spans in found.items() if any(spans)}
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


class StreamingLayer(FullLayer):
    """A layer of full attention; heads that keep the same window and first tokens share storage."""

    spans: Spans

    def __init__(self, spans: Spans, *args: Any, **room: Any) -> None:
        """`spans` says what each key/value head keeps; the rest as in `FullLayer`."""
        super().__init__(*args, **room)
        self.spans, self.record_past = spans, False
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.groups: list[HeadGroup] = []
        self.count = 0
        self.starts: tuple[int, ...] | None = None
        self.fresh: tuple[Tensor, Tensor] | None = None
        self.program: int | None = None
        super().reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these. Raises ValueError where the plan is for another number of heads."""
        if key_states.shape[1] != len(self.spans):
            raise ValueError(
                f"cache: the plan is for {len(self.spans)} key/value heads, got keys with {key_states.shape[1]}; "
                "calibrate the model in the form in which it runs"
            )
        super().lazy_initialization(key_states, value_states)
        for span in dict.fromkeys(self.spans):
            heads = [head for head, own in enumerate(self.spans) if own == span]
            most = None if span is None else sum(span)
            reserve = self.reserve if most is None else min(self.reserve, most)
            like = some_heads(key_states, heads), some_heads(value_states, heads)
            self.groups.append(HeadGroup(heads, Tokens(*like, self.stored, reserve, self.growth, most), span))

    def attend(self, module: nn.Module, request: AttentionRequest, forced: str | None, wanted: bool) -> Tensor:
        """What the layer's plan computes over its tokens; see `streams.attend_streams`."""
        from .streams import attend_streams  # imported here: a cache is made without what runs plans

        return attend_streams(module, request, self, forced, wanted)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take `[batch, num_kv_heads, n, head_dim]`; the attention of this call stores and reads it (`read`).

        RuntimeError where a gradient is wanted or tokens before these were not read, ValueError beyond `max_cache_len`.
        """
        refuse_gradients("dropped", key_states, value_states)
        if self.fresh is not None:
            raise RuntimeError(
                "cache: the tokens before these were never attended to; a cache with streaming=True serves models "
                "whose every layer hands its keys to attention"
            )
        total = self.count + key_states.shape[2]
        room_for(self.limit, total)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif not self._assigned():
            same_rows(self.keys.shape[0], key_states)
        self.count, self.fresh = total, (key_states, value_states)
        self._show(*self._surfaces(key_states, value_states))
        return self._surfaces(key_states, value_states, streams=self)

    def _surfaces(self, keys: Tensor, values: Tensor, streams: Any = None) -> tuple[StoredTensor, StoredTensor]:
        """The shape of all tokens, of as many sequences and channels as these have, without memory.

        The layer's own `keys` and `values` leave `streams` out: a layer that refers to itself would be freed late.
        """
        full = (like.new_empty(1).expand(*like.shape[:2], self.count, like.shape[3]) for like in (keys, values))
        key, value = (StoredTensor(one, None, one.shape[3], one.dtype, streams) for one in full)
        return key, value

    def read(self, starts: tuple[int, ...], queries: Tensor | None = None) -> list[tuple[HeadGroup, Read]]:
        """Write what `update` took; returns the groups of heads, each with what this call reads.

        `starts` are the rows' first real tokens, all tokens where all are padding; a ValueError for another start whose
        keys are gone. A prompt's keys are rounded so that scores with queries like its own change least.
        """
        assert self.fresh is not None  # `attend_streams` has checked it
        keys, values = self.fresh
        past = self.count - keys.shape[2]
        gone = not all(group.whole for group in self.groups)
        if gone and any(
            old != new and min(old, new) < past for old, new in zip(self.starts or (), starts, strict=True)
        ):
            raise ValueError(
                f"attention_mask: its rows begin at {starts}, expected {self.starts} as before, since streaming heads "
                "keep the first tokens of each row; pass the mask of the whole sequence in every call"
            )
        self.starts, self.fresh = starts, None
        read: list[tuple[HeadGroup, Read]] = []
        for group in self.groups:
            own = some_heads(keys, group.heads), some_heads(values, group.heads)
            if not past and queries is not None:
                of_group = queries.unflatten(1, (keys.shape[1], -1))[:, list(group.heads)]
                group.tokens.expect(of_group.flatten(1, 2))
            read.append((group, group.append(*own, starts, self.record_past)))
        return read

    def withdraw(self) -> None:
        """Take back the last `update`, whose attention was refused."""
        if self.fresh is not None:
            self.count -= self.fresh[0].shape[2]
            self._show(*self._surfaces(*self.fresh))
            self.fresh = None

    def fits(self, plan: LayerPlan) -> bool:
        """Whether the heads keep exactly what this plan lets them read."""
        return spans_in(plan) == self.spans

    def get_seq_length(self) -> int:
        """Tokens seen, those that no head keeps any more counted."""
        return self.count

    def kept(self) -> list[Tokens]:
        """The tokens of each group of heads."""
        return [group.tokens for group in self.groups]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; the count is negative, as in Transformers.

        Raises:
            RuntimeError: Heads have forgotten tokens that they would read then.
        """
        negative(tokens_to_remove)
        if not self.groups:
            return
        for group in self.groups:
            if group.span is not None and not group.can_crop(-tokens_to_remove):
                raise RuntimeError(
                    f"crop: heads of this layer keep {group.span[1]} first tokens and the last {group.span[0]} of "
                    f"{self.count}, what they would read after it is gone; call activate_past_recording() before the "
                    "tokens that may have to be taken back, or use a cache with streaming=False"
                )
        for group in self.groups:
            group.crop(-tokens_to_remove)
        self.count += tokens_to_remove
        self._show(*self._surfaces(self.keys.codes, self.values.codes))

    def activate_past_recording(self) -> None:
        """From now to the next `crop`, keep what it may have to bring back; assisted decoding calls this."""
        self.record_past = True

    def change(self, tokens: Callable[[Tokens], None], plain: Callable[[Tensor], Tensor]) -> None:
        """Change all tokens, and what is said of their rows."""
        if not self.groups:
            return
        keys, values = (plain(one.codes[:, :, :0]) for one in (self.keys, self.values))
        super().change(tokens, plain)
        self._show(*self._surfaces(keys, values))
        if self.starts is not None:
            self.starts = tuple(plain(torch.tensor(self.starts, dtype=torch.int64, device="cpu")).tolist())
        for group in self.groups:
            group.commit()  # what was recorded for `crop` belongs to the rows as they were

    def held(self) -> dict[str, Tensor]:
        """All tensors of the storage, by group and name; `take` puts them into an empty layer."""
        found = {"starts": torch.tensor(self.starts, dtype=torch.int64, device="cpu")}
        for number, tokens in enumerate(self.kept()):
            found |= {f"{number}.{name}": tensor for name, tensor in tokens.held().items()}
        return found

    def take(self, held: Mapping[str, Tensor], length: int, dtype: torch.dtype) -> None:
        """Fill this empty layer with what `held` gave, of `length` tokens seen by a model of this dtype."""
        parts = [
            {name.partition(".")[2]: tensor for name, tensor in held.items() if name.startswith(f"{number}.")}
            for number, _ in enumerate(dict.fromkeys(self.spans))
        ]
        like = [one[:, :1].to(dtype).expand(-1, len(self.spans), -1, -1) for one in numbers_like(parts[0], dtype)]
        self.lazy_initialization(*like)
        for part, group in zip(parts, self.groups, strict=True):
            group.tokens.take(part)
            group.count = length
        self.count, self.starts = length, tuple(held["starts"].tolist())
        self._show(*self._surfaces(*like))
