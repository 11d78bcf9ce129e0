"""The mask function that Transformers calls once per forward pass and kind of mask; it returns a mask proxy."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.attention.tracing import tracing, transient
from adaattn_hf.backends.select import missing
from adaattn_hf.config import raw_settings

from ..models.cache_keyword import CACHE_KEYWORDS, arguments_of
from ..models.families import DENSE_MASK, LOSES_BORDERS, UnsupportedModel, family_of, refusal_of
from .documents import with_documents, with_restarts
from .mask_pattern import causality, read_pattern
from .structured_mask import StructuredMask, recall, store_structure

_NATIVE = ("adaattn", "adaattn_native")
"""Names under which the native kernels serve a processor."""


def adaattn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    config: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> StructuredMask | Tensor:
    """Returns a `StructuredMask`, or a dense boolean mask for model families that need a tensor.

    Never None, because attention reads causality from the mask and not from the module. UnsupportedModel where the
    model does not use Transformers' attention interface: it would silently run another attention as `adaattn`.
    """
    if isinstance(attention_mask, StructuredMask):
        # made by generate(), and passed to the model's forward, which asks again
        return attention_mask
    mask_device = torch.device(device)
    causal = causality(mask_function)
    # the most frequent case, a bare causal or bidirectional mask without padding: nothing has to be read
    bare = causal is not None and type(q_offset) is int and not use_vmap
    bare = bare and (attention_mask is None or _hides_nothing(attention_mask, kv_length + kv_offset))
    key = None
    if bare and not transient():
        key = (type(config), causal, batch_size, q_length, kv_length, q_offset, kv_offset)
        if (shared := recall(key)) is not None:
            return StructuredMask(shared, mask_device)
    family = family_of(config)
    if config is not None and (reason := refusal_of(type(config))) is not None:
        raise UnsupportedModel(reason)
    alone: bool = False
    caller: dict[str, Any] = {}
    if family in LOSES_BORDERS and not tracing():
        alone, caller = caller_arguments()

    def stock() -> Tensor:
        built = sdpa_mask(
            q_offset=q_offset,  # type: ignore[arg-type]  # also a tensor, whatever its signature says
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, kv_offset=kv_offset, use_vmap=use_vmap,
            mask_function=mask_function, attention_mask=attention_mask, device=device,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
        )  # fmt: skip
        assert built is not None  # only the skips give none
        return built

    if family in DENSE_MASK:
        return stock()
    if bare or alone:
        attention_mask = None  # at most one of ones; the model may have made it itself
    padding = None
    if attention_mask is not None:  # of this call's keys, hidden beyond its end
        if not tracing() and attention_mask.shape[0] != batch_size:  # while tracing both may be symbols
            raise ValueError(
                f"attention_mask: got {attention_mask.shape[0]} rows for a batch of {batch_size}, expected one for "
                "each sequence; repeat or drop rows of the mask"
            )
        missing = kv_length + kv_offset - attention_mask.shape[1]
        padding = F.pad(attention_mask, (0, missing), value=False) if missing > 0 else attention_mask
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    rules = None if use_vmap else _rules_of(mask_function, q_length, kv_length, kv_offset)
    # with a mask Transformers looks for no documents in positions, and before 5.23 it counts chunks along the row if
    # it finds some; what it composed is not read in a compiled graph
    chunks = (
        rules is None
        and (attention_mask is not None or not hasattr(masking_utils, "remap_positions_for_packed_sequence"))
        and getattr(config, "attention_chunk_size", None) is not None
        and torch.compiler.is_compiling()
    )
    rules = {"mask": stock()} if rules is None else {"key_padding": padding, **rules}
    # A preallocated cache increments this very tensor in place when it is updated, so it is copied.
    offset = (q_offset.clone() if isinstance(q_offset, Tensor) else q_offset) - kv_offset
    dropped = _dropped(attention_mask, kv_offset)
    structure = MaskStructure(batch_size, q_length, kv_length, q_offset=offset, dropped=dropped, **rules)
    if key is not None and family not in LOSES_BORDERS:  # else what its caller told is looked up each time
        store_structure(key, structure)
    if caller:
        cu_q, cu_k, positions = map(caller.get, ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids"))
        if cu_q is not None:
            structure = with_documents(structure, cu_q, cu_k)
        elif alone and positions is not None:
            structure = with_restarts(structure, positions)
    structure = _for_graphs(structure, mask_device, padding, config)
    return StructuredMask(structure, mask_device, chunks)


def _rules_of(mask_function: Callable[..., Any], q_len: int, kv_len: int, kv_offset: int) -> dict[str, Any] | None:
    # counted from this call's first key; None where a dense mask must say them
    read = read_pattern(mask_function)
    if read is None or "causal" not in read or "key_padding" in read:
        return None
    rules = dict(read)
    if "k_segments" in rules:
        if q_len != kv_len:
            return None
        rules["q_segments"] = rules["k_segments"]
    if "chunk_start" in rules:
        rules["chunk_start"] = rules["chunk_start"] - kv_offset
    if "spans" in rules:
        spans, missing = rules["spans"], kv_len + kv_offset - rules["spans"].shape[1]
        spans = F.pad(spans, (0, missing), value=-1) if missing > 0 else spans
        rules["spans"] = spans[:, kv_offset : kv_offset + kv_len]
    return rules


def _for_graphs(structure: MaskStructure, device: Any, padding: Tensor | None, config: Any) -> MaskStructure:
    # in a traced graph one dense mask for all layers, unless a kernel reads the structure while the graph runs; chunks
    # stay, as lengths of documents, which are heard of later, move where they begin
    if not tracing() or structure.plain or structure.chunk is not None:
        return structure
    if torch.compiler.is_compiling() and _is_read(structure, torch.device(device).type, config):
        return structure
    batch, q_len, kv_len = structure.batch, structure.q_len, structure.kv_len
    if raw_settings(config) is None:
        padding = None
    elif padding is None:  # models with settings of this package keep it: plans count from the first real token
        padding = torch.ones(batch, kv_len, dtype=torch.bool, device=device)
    return MaskStructure(
        batch, q_len, kv_len, q_offset=structure.q_offset, key_padding=padding, mask=structure.visible(device=device),
        dropped=structure.dropped,
    )  # fmt: skip


def _is_read(structure: MaskStructure, device: str, config: Any) -> bool:
    # off its tensors in a traced graph: on CUDA that of one query per sequence
    if structure.mask is not None or torch.onnx.is_in_onnx_export():
        return False
    native = device == "cpu" and getattr(config, "_attn_implementation", "") in _NATIVE
    step = device == "cuda" and structure.q_len == 1 and structure.one_run_a_row and not torch.is_grad_enabled()
    return (native and not missing("native")) or (step and not missing("triton"))


def _hides_nothing(attention_mask: Any, length: int) -> bool:
    return (  # only looks where that is cheap: on the CPU, and not in a traced graph
        type(attention_mask) is Tensor  # subclasses may hold no data
        and attention_mask.is_cpu
        and not tracing()
        and attention_mask.shape[1] >= length
        and bool(attention_mask.all())
    )


def _dropped(attention_mask: Tensor | None, kv_offset: int) -> int | Tensor:
    # how many tokens stood before this call's first key, `[batch]` where padding before them is not counted
    if attention_mask is None or kv_offset == 0:
        return kv_offset
    return (kv_offset - attention_mask.int().argmax(1)).clamp_min(0)


def caller_arguments() -> tuple[bool, dict[str, Any]]:
    """Looks up what the model that makes a mask was called with.

    Returns whether it is a call without a mask and without a cache, and its arguments by name, none where no model is
    found. In Transformers positions that fall back tell documents in such calls alone; an empty cache is one, too.

    Transformers hands a mask function sizes, a padding mask and the configuration, and attention what the model passes
    on. A few families pass on no lengths, make their masks without positions, or make a mask of ones themselves, and an
    empty cache leaves no trace in sizes. No argument and no documented hook of theirs tells the rest for a model that
    is only loaded by `attn_implementation`. So the call stack is read, from the mask function to the call of the model.
    """
    # what calls the mask function: in Transformers it has the cache among its arguments
    caller = sys._getframe(2)
    variables = caller.f_locals
    caches = [variables[name] for name in CACHE_KEYWORDS if name in variables]
    model: Any = None
    frame: FrameType | None = caller
    while frame is not None:
        variables, frame = frame.f_locals, frame.f_back
        owner = variables.get("self", model)
        if model is None and isinstance(owner, nn.Module):
            model = owner
        if owner is not model:
            break
        # a call around the model's forward, which itself may have set its arguments anew
        if model is not None and {"self", "args", "kwargs"}.issubset(variables):  # keys() is a list in Python 3.13
            arguments = arguments_of(inspect.signature(type(model).forward), variables["args"], variables["kwargs"])
            bare = len(caches) == 1 and caches[0] is None and arguments.get("attention_mask") is None
            return bare, arguments
    return False, {}
