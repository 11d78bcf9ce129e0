"""A cache layer in which each head keeps only what its plan reads: a window and the first tokens, or all tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaattn_hf.attention.call import AttentionCall, AttentionResult, head_dim_of
from adaattn_hf.attention.heads import joined_heads, picked
from adaattn_hf.attention.infer import infer_structure
from adaattn_hf.attention.listeners import ask, listeners, show
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select
from adaattn_hf.config import settings_in
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.plan import LayerPlan, Plan

from ..plans.attach import plan_of
from ..plans.bound import checked_layer
from ..plans.slots import LAYER
from .formats import SMOOTHED, Read, StoredTensor, check_channels
from .groups import HeadGroup, Spans, room_of, slots_seen, starts_of, structure_of
from .layers import CachedLayer
from .store import Room, Store

_OTHER = "cache: its heads keep the windows of a plan, and {} has {} now; make the cache after loading the plan"


def spans_of(model: PreTrainedModel, plan: Plan | None = None) -> dict[int, Spans]:
    """Returns what heads keep by a plan, for each layer where some keep less than all; ValueError without windows."""
    plan = plan_of(model) if plan is None else plan
    spans = {} if plan is None else {layer.layer: spans_in(layer) for layer in plan.layers}
    spans = {layer: kept for layer, kept in spans.items() if any(kept)}
    if not spans:
        raise ValueError(
            f"streaming: got True for {type(model).__name__} {'without a plan' if plan is None else 'and its plan'}, "
            f"expected one with windows of at least {SMOOTHED} tokens (adaattn calibrate MODEL --families window); "
            "other heads keep everything, so leave streaming out"
        )
    return spans


def spans_in(layer: LayerPlan) -> Spans:
    """What each head keeps by a layer's plan; windows of less than 16 tokens save nothing."""
    spans = (choice.span for choice in layer.choices)
    return tuple(span if span is not None and span[0] >= SMOOTHED else None for span in spans)


class StreamingLayer(CachedLayer):
    """A layer of full attention; heads that keep the same window and first tokens share a store.

    `update` takes tokens, and the attention of the same call stores and reads them (`attend`): only then it is known
    where each row begins. `keys` and `values` have the shape of all tokens, and no memory. Behind a prompt steps of a
    fixed room may be part of graphs (`_in_graph`).
    """

    spans: Spans
    _seen: int | None

    def __init__(self, spans: Spans, stored: str, room: Room | None = None) -> None:
        """`spans` says what each key/value head keeps; the rest as in `CachedLayer`."""
        self.spans = spans
        super().__init__(stored, room)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.groups: list[HeadGroup] = []
        self.starts: tuple[int, ...] | None = None
        self.fresh: tuple[Tensor, Tensor] | None = None
        self.bound_layer: int | None = None
        self._steady = False

    @property
    def cumulative_length(self) -> int:
        """Tokens seen; behind a captured step the device has to be asked."""
        if self._seen is None:
            self._seen = self.groups[0].count
        return self._seen

    @cumulative_length.setter
    def cumulative_length(self, tokens: int) -> None:
        """As the host counts."""
        self._seen = tokens

    @property
    def steps_in_graphs(self) -> bool:
        """Whether a graph can write and read the next token: not while rows behind padding have sinks in the ring."""
        return self._steady and self.bound_layer is not None and not self.record_past

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for tokens shaped like these. Raises ValueError where the plan is for another number of heads."""
        if key_states.shape[1] != len(self.spans):
            raise ValueError(
                f"cache: the plan is for {len(self.spans)} key/value heads, got keys with {key_states.shape[1]}; "
                "calibrate the model in the form in which it runs"
            )
        check_channels(self.stored, value_states.shape[3])
        self._begin(
            lambda heads, room: self.format.store(picked(key_states, heads, 1), picked(value_states, heads, 1), room),
            key_states,
            value_states,
        )

    def _begin(self, store: Callable[[list[int], Room], Store], *like: Tensor) -> None:
        self.device, self.dtype, self.is_initialized = like[0].device, like[0].dtype, True
        self.channels = [head_dim_of(tensor) for tensor in like]
        for span in dict.fromkeys(self.spans):
            heads = [head for head, kept in enumerate(self.spans) if kept == span]
            self.groups.append(HeadGroup(heads, span, self.format, store(heads, room_of(span, self.room))))

    # ---------------- what is held
    def stores(self) -> Sequence[Store]:
        """The tokens of each group of heads."""
        return [group.store for group in self.groups]

    def _views(self, last: int | None = None, streams: Any = None, room: int | None = None) -> tuple[Any, Any]:
        """The layer's own leave `streams` out: a layer that refers to itself would be freed late."""
        store, stand_ins = self.groups[0].store, []
        for channels in self.channels:
            extents = store.batch, len(self.spans), self.cumulative_length if room is None else room, channels
            nothing = torch.empty(1, dtype=self.dtype, device=store.device).expand(extents)
            stand_ins.append(StoredTensor(nothing, None, self.dtype, streams=streams))
        return stand_ins[0], stand_ins[1]

    def held(self) -> dict[str, Tensor]:
        """All tensors of the tokens, by group and name; `take` puts them into an empty layer."""
        held = {"starts": torch.tensor(self.starts, dtype=torch.int64, device="cpu")}
        for number, store in enumerate(self.stores()):
            held |= {f"{number}.{name}": tensor for name, tensor in store.held().items()}
        return held

    def take(self, held: Mapping[str, Tensor], length: int, dtype: torch.dtype) -> None:
        """Fill this empty layer with what `held` gave, of `length` tokens seen by a model of this dtype."""
        parts = iter(
            {name.partition(".")[2]: tensor for name, tensor in held.items() if name.startswith(f"{number}.")}
            for number, _ in enumerate(dict.fromkeys(self.spans))
        )
        first = [held[f"0.{name}"] for name in self.format.parts if not name.endswith("scale")]
        self._begin(lambda heads, room: self.format.restored(next(parts), room), *first)
        self.dtype = dtype
        for group in self.groups:
            group.count = length
        self.cumulative_length, self.starts = length, tuple(held["starts"].tolist())

    # ---------------- writing
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take `[batch, num_kv_heads, n, head_dim]`; the attention of this call stores and reads it (`attend`).

        RuntimeError where a gradient is wanted or tokens before these were not read, ValueError beyond `max_cache_len`.
        """
        if self.fresh is not None:
            raise RuntimeError(
                "cache: the tokens before these were never attended to; a cache with streaming=True serves models "
                "whose every layer hands its keys to attention"
            )
        return super().update(key_states, value_states)

    def _step_in_graph(self, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
        self.fresh = keys, values
        return self._views(streams=self, room=self.room.limit)

    def _take_tokens(self, keys: Tensor, values: Tensor, past: int, whole: bool) -> tuple[Any, Any]:
        self.fresh = keys, values
        return self._views(streams=self, room=self.room.limit if whole else None)

    def read(self, starts: tuple[int, ...], queries: Tensor | None = None) -> list[tuple[HeadGroup, Read]]:
        """Write what `update` took; returns the groups of heads, each with what this call reads.

        `starts` are the rows' first real tokens, all tokens where all are padding; a ValueError for another start whose
        keys are gone. A prompt's keys are rounded so that scores with queries like its own change least.
        """
        assert self.fresh is not None  # `attend` has checked it
        keys, values = self.fresh
        past = self.cumulative_length - keys.shape[2]
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
            if not past and queries is not None:
                of_group = queries.unflatten(1, (keys.shape[1], -1))[:, list(group.heads)]
                group.format.expect(group.store, of_group.flatten(1, 2))
            tokens = picked(keys, group.heads, 1), picked(values, group.heads, 1)
            read.append((group, group.append(*tokens, starts, self.record_past)))
        self._settle()
        return read

    def _settle(self) -> None:
        """Tell graphs what stays where it is, and whether they may go on."""
        rings = [sum(group.span) for group in self.groups if group.span and group.span[1] and group.store.room.ring]
        gone = self.cumulative_length - max(rings, default=-1)
        self._steady = self.room.fixed and all(not start or start <= gone for start in self.starts or ())
        for store in self.stores():
            store.stay()

    # ---------------- changing
    def _forget(self, count: int) -> None:
        for group in self.groups:
            if group.span is not None and not group.can_crop(count):
                raise RuntimeError(
                    f"crop: heads of this layer keep {group.span[1]} first tokens and the last {group.span[0]} of "
                    f"{self.cumulative_length}, what they would read after it is gone; call activate_past_recording() "
                    "before them (`generate` does so of an AdaAttnCache that you pass), or use streaming=False"
                )
        for group in self.groups:
            group.crop(count)
            self.cumulative_length = group.count
        self._settle()

    def _change(self, change: Callable[[Store], None]) -> None:
        super()._change(change)
        for group in self.groups:
            group.commit()  # what was recorded for `crop` belongs to the rows as they were

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        super().batch_select_indices(indices)
        if self.starts is not None:
            self.starts = tuple(torch.tensor(self.starts, dtype=torch.int64, device="cpu")[indices.cpu()].tolist())

    # ---------------- attention
    def attend(self, module: nn.Module, call: AttentionCall, forced: str | None, wanted: bool) -> Tensor:
        """Returns what the layer's plan computes over a full cache, `[batch, q_len, heads, head_dim_v]`.

        One call for each group of heads that keep the same tokens. ValueError: the plan is gone or another, speaks
        for shorter sequences, or the call needs keys that are gone.
        """
        if torch.compiler.is_compiling():
            _nobody_looks(module, wanted)
            return self._in_graph(module, call, forced)
        query = call.query
        if self.fresh is None:
            raise RuntimeError(
                f"cache: nothing new for {type(module).__name__} to attend to; layers that read the keys of others are "
                "not served, use a cache with streaming=False"
            )
        fresh = tuple(tensor.to(query.dtype) for tensor in self.fresh)
        total, padding = self.cumulative_length, call.structure.key_padding
        try:
            _nobody_looks(module, wanted)
            bound_layer = checked_layer(module)
            handle, other = (None, "none") if bound_layer is None else (bound_layer.handle, "another one")
            if bound_layer is None or (handle != self.bound_layer and spans_in(bound_layer.plan) != self.spans):
                raise ValueError(_OTHER.format(type(module).__name__, other))
            self.bound_layer = handle
            if self.room.fixed and call.structure.kv_len != total and call.structure.mask is None:
                # without the places that hold no token yet
                padding = None if padding is None else padding[:, :total]
                call.structure = call.structure.with_changes(kv_len=total, key_padding=padding)
            masked = call.structure.mask is not None or call.bias is not None
            structure = _served(infer_structure(call) if masked else call, bound_layer)
            read = self.read(structure.cached(starts_of), query)
        except ValueError:
            if self.fresh is not None:  # the last `update` is taken back
                self.cumulative_length, self.fresh = total - self.fresh[0].shape[2], None
            raise
        if total == query.shape[2]:
            whole = replace(call, key=fresh[0], value=fresh[1], structure=structure, bias=None)
            return _answer(module, bound_layer, whole, forced)
        outs = []
        for group, tokens in read:
            visible = structure if group.span is None else structure.cached(structure_of, *group.span)
            of_group = bound_layer.of_heads(group.heads, all_keys=group.span is not None)
            out = _answer(module, of_group, self._part(call, group, tokens, visible), forced)
            outs.append((group.heads, AttentionResult(out)))
        return joined_heads(outs, query.shape[1] // len(self.spans)).out

    def _part(self, call: AttentionCall, group: HeadGroup, read: Read, structure: MaskStructure) -> AttentionCall:
        """What a call asks of the heads of a group."""
        key, value, record = read
        groups, query = call.query.shape[1] // len(self.spans), call.query
        members = [head * groups + member for head in group.heads for member in range(groups)]
        if record is None:
            key, value = key.to(query.dtype), value.to(query.dtype)
        sinks = None if call.sink_logits is None else picked(call.sink_logits, members, 0)
        return AttentionCall(
            picked(query, members, 1), key, value, structure, call.scaling, call.dropout, call.softcap, sinks,
            stored=record,
        )  # fmt: skip

    def _in_graph(self, module: nn.Module, call: AttentionCall, forced: str | None) -> Tensor:
        """As `attend`, of one token while a graph is traced: the device counts."""
        if getattr(module, LAYER).handle != self.bound_layer or self.fresh is None:
            raise ValueError(_OTHER.format(type(module).__name__, "another one"))
        (keys, values), self.fresh, self._seen = self.fresh, None, None
        outs = []
        for group in self.groups:
            ring = group.store.room.ring
            tokens = group.step(picked(keys, group.heads, 1), picked(values, group.heads, 1))
            visible = call.structure if ring is None else call.structure.cached(slots_seen, tokens[0].shape[2], ring[0])
            outs.append((group.heads, select.attend(self._part(call, group, tokens, visible), forced)))
        return joined_heads(outs, call.query.shape[1] // len(self.spans)).out


def _answer(module: nn.Module, bound_layer: BoundLayer, call: AttentionCall, forced: str | None) -> Tensor:
    heard_by, call.layer, call.backend = listeners(), bound_layer.plan.layer, forced
    out = ask(heard_by, module, call)
    if out is None:
        out = execute.attend(bound_layer, call, forced).out
    show(heard_by, module, call, out)
    return out


def _nobody_looks(module: nn.Module, wanted: bool) -> None:
    who = {"output_attentions": wanted}
    if not torch.compiler.is_compiling():  # in a graph nobody listens
        settings = settings_in(getattr(module, "config", None))
        who |= dict.fromkeys((listener.whole for listener in listeners() if listener.whole), True)
        who["adaattn.monitor"] = settings.monitor
    if any(who.values()):
        raise ValueError(
            f"cache: {', '.join(name for name, holds in who.items() if holds)} asks for all keys, which streaming "
            "heads do not keep; use a cache with streaming=False"
        )


def _served(call: AttentionCall | None, bound_layer: BoundLayer) -> MaskStructure:
    where = f"cache: layer {bound_layer.plan.layer} has streaming heads, which keep no keys beyond their windows"
    structure, rules = None if call is None else call.structure, ("mask", "spans", "chunk", "k_segments", "window")
    if (
        structure is None
        or call is None
        or call.bias is not None
        or any(getattr(structure, rule) is not None for rule in rules)
        or (structure.q_len > 1 and not structure.causal)
        or (structure.causal and structure.offset() != structure.kv_len - structure.q_len)
    ):
        raise ValueError(
            f"{where}, and serve causal sequences with padding alone, not documents, chunks, a bias, a preallocated "
            "cache or a dense mask without rules; use a cache with streaming=False"
        )
    within = execute.rows_within(structure, bound_layer.max_length, call.query.device)
    if within is not True and not (within is not False and bool(within.all())):
        raise ValueError(
            f"{where}, and the plan speaks for up to {bound_layer.max_length} tokens, got {structure.kv_len}: "
            "later rows are exact and read every key. Use a cache with streaming=False, or calibrate for longer "
            "sequences (--lengths)"
        )
    return structure
