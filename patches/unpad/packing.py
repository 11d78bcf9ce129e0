"""Packs the padded batch of one model call into one row of real tokens, where that can be, and pads it again.

The keys of its cache are packed and padded likewise.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..models.cache_keyword import cache_in
from ..models.families import ENCODER_ONLY, NUMBERS_TOKENS, family_of
from ..models.positions import ropes_of, set_by_length
from ..models.support import is_ours

IGNORED_LABEL = -100
_REPLACED = (
    "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "logits_to_keep",  # of a base model that computes the last columns alone: a packed row has no columns
)  # fmt: skip
QUEUED = ("cuda",)
"""Devices that compute while the host queues the next kernels, so that a pass is as slow as the slower of the two."""
LEAST_STATES = 1 << 24
"""Numbers of a padded batch's hidden states from which on removing its padding pays on such a device.

Raced on an H200 over batches of 512 columns, 37 % of them real, bfloat16: of BERT-base's shape 32 rows gain or lose by
how fast the host is, 64 gain; of BERT-large's 16 lose, and 32 gain.
"""
Numbering = Literal["columns", "tokens"] | int
"""How a model numbers positions: columns, real tokens, or real tokens from behind this index, which padding has."""


FREE = (
    "no attention_mask", "one token per row", "already packed (cu_seq_lens_q)", "no padding",
    "a batch this small takes a GPU no longer than its host, with padding or without",
)  # fmt: skip
"""Reasons for which a call is not packed and loses nothing by it: for any other its padding is (or may be) computed."""


class PackedLayout:
    """Maps the real tokens of `[batch, length]`, row after row, to one packed row `[1, tokens]`, and back.

    Attributes:
        batch, length: Shape of the padded form.
        lengths: Number of real tokens in each row.
        starts: Column of the first real token of each row, `length` where a row has none.
        index: `[tokens]` gather indices of the real tokens in the flattened padded form.
        cu_seq_lens: `[batch + 1]` int32, cumulative sums of `lengths` from 0.
        tokens: Number of real tokens.
        full: Whether there is no padding.
        contiguous: Whether no row has padding between real tokens.
    """

    def __init__(self, mask: Tensor) -> None:
        """The layout for a padding mask `[batch, length]`, true for real tokens; copies it to the host."""
        real = mask.detach().bool().cpu()
        self.batch, self.length = real.shape
        counts, ones = real.sum(dim=1), real.int()
        first = torch.where(real.any(1), ones.argmax(1), self.length)
        last = self.length - 1 - ones.flip(1).argmax(1)
        self.lengths: tuple[int, ...] = tuple(counts.tolist())
        self.starts: tuple[int, ...] = tuple(first.tolist())
        self.index = real.flatten().nonzero().flatten().to(mask.device)
        self.tokens = len(self.index)
        self.full = self.tokens == self.batch * self.length
        self.cu_seq_lens = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(mask.device)
        self.contiguous = bool(((last - first + 1 == counts) | (counts == 0)).all())

    def pack(self, padded: Tensor) -> Tensor:
        """`[batch, length, ...]` to `[1, tokens, ...]`."""
        return padded.flatten(0, 1).index_select(0, self.index.to(padded.device))[None]

    def pad(self, packed: Tensor) -> Tensor:
        """`[1, tokens, ...]` to `[batch, length, ...]`; padding is zero."""
        flat = packed.new_zeros((self.batch * self.length, *packed.shape[2:]))
        flat = flat.index_copy_(0, self.index.to(packed.device), packed[0])
        return flat.view(self.batch, self.length, *packed.shape[2:])


class PackedPrefill(Cache):
    """Replaces an empty cache, or none, during one forward pass over packed tokens.

    To the model it looks empty, so masks and positions are those of a call without a cache. Keys and values go to
    attention unchanged and to `target` padded, with zeros at padding, which later calls mask. That a cache is passed
    also keeps Transformers from inferring packed documents from gaps in the position ids.
    """

    def __init__(self, target: Cache | None, layout: PackedLayout) -> None:
        """`target` is the caller's empty cache, or None where the call returns no cache."""
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.target = target
        self.layout = layout

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores `[1, heads, tokens, head_dim]` in padded form and returns it unchanged."""
        if self.target is not None:
            keys, values = (self.layout.pad(new.transpose(1, 2)).transpose(1, 2) for new in (key_states, value_states))
            target: Any = getattr(self.target, "self_attention_cache", self.target)  # of an encoder-decoder's two
            target.update(keys, values, layer_idx, *args, **kwargs)
            layer = target.layers[layer_idx]
            if getattr(layer, "spans", None):  # streaming heads need to know where each row begins
                layer.read(self.layout.starts)
        return key_states, value_states


def read_layout(arguments: Mapping[str, Any], config: Any, pools: str, least: int) -> PackedLayout | str:
    """The layout of a call's real tokens, or why the call is not packed.

    `pools` is what a head reads of each row: its `first` place, the `last` one whose id is not that of padding, `all`.
    On a GPU a padded batch of fewer than `least` tokens stays as it is, and its mask is not looked at.
    """
    none, step, packed, full, small = FREE
    mask, past, ids = arguments.get("attention_mask"), cache_in(arguments), arguments.get("input_ids")
    inputs = arguments.get("inputs_embeds") if ids is None else ids
    if mask is None:
        return none
    if inputs is None or inputs.ndim != (3 if ids is None else 2):
        return "inputs are not [batch, length]"
    if inputs.shape[1] == 1:
        return step
    flat = isinstance(mask, Tensor) and mask.ndim == 2
    if flat and arguments.get("cu_seq_lens_q") is not None:
        return packed
    if flat and past is not None and int(past.get_seq_length()) > 0:
        return "the cache holds tokens already"
    if not flat or mask.shape != inputs.shape[:2]:
        return "attention_mask is not the 2-D mask of the padding"
    if inputs.device.type in QUEUED and inputs.shape[0] * inputs.shape[1] < least:
        return small
    layout = PackedLayout(mask)
    if layout.full:
        return full
    if layout.tokens == 0:
        return "nothing but padding"
    if not is_ours(getattr(config, "_attn_implementation", None)):
        # which would read across the rows of the batch
        return "another attention implementation was set since the model was prepared"
    if arguments.get("encoder_hidden_states") is not None:
        return "cross-attention (encoder_hidden_states)"
    for name in ("output_attentions", "output_router_logits"):
        value = arguments.get(name)
        if getattr(config, name, False) if value is None else value:
            return f"{name} asks for what only the padded form has"
    if pools == "first" and any(layout.starts):
        return "a row does not begin with a real token, and its first place is pooled"
    if pools == "all" or (pools == "last" and not _last_is_real(ids, mask, config.get_text_config().pad_token_id)):
        return "its head reads a place that the mask hides"
    if layout.tokens > getattr(config, "keep_window_size", layout.tokens):
        return "it chooses keys among those of all packed rows, where they are more than keep_window_size"
    if getattr(config, "attn_temperature_tuning", False) and max(layout.tokens, layout.length) >= config.floor_scale:
        return "it scales queries by columns of the row, from floor_scale on"
    if getattr(config, "token_dropout", False) and ids is not None and bool((ids == config.mask_token_id).any()):
        return "it scales a row by its share of masked tokens, which one packed row has not"
    if not layout.contiguous:  # windows, those of a plan too, count columns, which a packed row has lost
        return "padding between real tokens"
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        if name == "position_ids":
            fits = value.ndim == 2 and value.shape[0] in (1, layout.batch) and value.shape[1] == layout.length
        else:
            fits = value.ndim == 0 or value.shape[:2] == (layout.batch, layout.length)
        if not fits:
            return f"{name} has shape {list(value.shape)}, which is not [batch, length, ...]"
    if _turned_by_padding(arguments.get("position_ids"), layout, config):
        return "its rotary embeddings go by the largest position of a pass, which is at padding"
    return layout


def _turned_by_padding(positions: Tensor | None, layout: PackedLayout, config: Any) -> bool:
    # whether frequencies that Transformers sets anew in each pass (dynamic, longrope) would be others without padding
    longest = getattr(config, "max_position_embeddings", None) or 0
    moving = [rope for rope in ropes_of(config) if set_by_length(rope.get("rope_type"))]
    if not moving:
        return False
    numbers = torch.arange(layout.length, device="cpu")[None] if positions is None else positions
    largest, real = int(numbers.max()), int(layout.pack(numbers.expand(layout.batch, layout.length)).max())
    return largest != real and largest + 1 >= min(
        rope.get("original_max_position_embeddings") or longest for rope in moving
    )


def _last_is_real(ids: Tensor | None, mask: Tensor, pad: int | None) -> bool:
    # whether the mask shows the last token that Transformers' heads find: they look at ids and know no mask
    if ids is None or pad is None:
        return bool(mask[:, -1].all())
    columns = torch.arange(ids.shape[1], device=ids.device)
    return bool(mask.gather(1, (columns * (ids != pad)).argmax(1, keepdim=True).to(mask.device)).all())


def scored_padding(arguments: Mapping[str, Any], *, shifted: bool) -> str | None:
    """Why a call needs outputs at padding positions, which only the padded form has; None if it does not."""
    mask, keep = arguments.get("attention_mask"), arguments.get("logits_to_keep")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    inputs = [arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None]
    step = any(tensor.shape[1] == 1 for tensor in inputs)  # which looks at no data
    if not step and isinstance(keep, int) and keep and not bool(mask[:, -keep:].any(1).all()):
        return "all logits to keep of a row are at padding"
    if arguments.get("start_positions") is not None:
        return "the loss of start_positions is over padding positions, too"
    pads = ~mask.bool()
    for name in ("labels", "shift_labels"):
        labels = arguments.get(name)
        if not isinstance(labels, Tensor) or labels.shape != mask.shape:
            continue
        scored = (labels != IGNORED_LABEL).to(pads.device)
        bad = scored & pads
        if shifted and name == "labels":
            bad = bad[:, 1:] | (scored[:, 1:] & pads[:, :-1])
        if bool(torch.any(bad)):
            return "a label is scored at a padding position"
    return None


def has_cache(config: Any) -> bool:
    """Whether the model can keep keys and values from call to call."""
    return family_of(config) not in ENCODER_ONLY or bool(getattr(config, "is_decoder", False))


def makes_cache(module: nn.Module, arguments: Mapping[str, Any], config: Any) -> bool:
    """Whether the model creates a cache for this call, though none was passed."""
    if not has_cache(config) or (module.training and getattr(module, "gradient_checkpointing", False)):
        return False
    use_cache = arguments.get("use_cache")
    return bool(getattr(config, "use_cache", False) if use_cache is None else use_cache)


def pack_call(
    module: nn.Module,
    arguments: Mapping[str, Any],
    layout: PackedLayout,
    numbering: Numbering,
    config: Any,
    *,
    cache: str | None,
    shifted_labels: bool,
) -> dict[str, Any]:
    """The packed call: one row of real tokens with their positions, and `cu_seq_lens` for the borders between rows."""
    ids, positions = arguments.get("input_ids"), arguments.get("position_ids")
    like = arguments["inputs_embeds"] if ids is None else ids
    if positions is None:
        positions = _padded_positions(numbering, ids, arguments["attention_mask"], like.device)
    packed = {
        name: layout.pack(value) if isinstance(value, Tensor) and value.ndim >= 2 else value
        for name, value in arguments.items()
        if name not in _REPLACED
    }
    packed["position_ids"] = layout.pack(positions.expand(layout.batch, layout.length))
    labels = packed.get("labels")
    if shifted_labels and labels is not None:
        starts = layout.cu_seq_lens[:-1][layout.cu_seq_lens.diff() > 0]
        packed["labels"] = labels.index_fill(1, starts.long().to(labels.device), IGNORED_LABEL)
    packed["cu_seq_lens_q"] = packed["cu_seq_lens_k"] = layout.cu_seq_lens.to(like.device)
    packed["max_length_q"] = packed["max_length_k"] = max(layout.lengths)
    if cache is not None and has_cache(config):
        past: Cache | None = arguments.get(cache)
        if past is None and makes_cache(module, arguments, config):
            past = DynamicCache(config=config)
        packed[cache] = PackedPrefill(past, layout)
    return packed


def numbering_of(trunk: nn.Module, config: Any) -> Numbering:
    """The rule by which this model numbers the positions of a padded batch; packed tokens must keep these."""
    for module in trunk.modules():
        if hasattr(module, "create_position_ids_from_inputs_embeds") and "padding_idx" in vars(module):
            return int(vars(module)["padding_idx"])
    return "tokens" if family_of(config) in NUMBERS_TOKENS else "columns"


def _padded_positions(numbering: Numbering, ids: Tensor | None, mask: Tensor, device: torch.device) -> Tensor:
    # `[batch or 1, length]`
    columns = torch.arange(mask.shape[1], device=device)[None]
    if numbering == "columns":
        return columns
    if numbering == "tokens":
        real = mask.long().to(device)
        return real.cumsum(dim=1) * real - 1
    # RoBERTa's rule: real tokens are numbered from `numbering + 1`, padding gets `numbering`
    if ids is None:
        return columns + numbering + 1
    real = ids.ne(numbering).long()
    return real.cumsum(dim=1) * real + numbering
