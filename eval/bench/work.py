"""What an attention cell does, for one implementation: a function without arguments that does it once."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from adaattn_hf.attention.structure import MaskStructure

from .grid import Cell

Work = Callable[[], Any]


def _layer(cell: Cell, implementation: str) -> Any:
    """A module with all that attention functions read of one."""
    layer: Any = nn.Module()
    layer.layer_idx, layer.training, layer.is_causal = 0, cell.gradient, cell.mask == "causal"
    layer.num_key_value_groups = cell.heads // cell.kv_heads
    layer.config = transformers.LlamaConfig(
        hidden_size=cell.heads * cell.head_dim,
        num_attention_heads=cell.heads,
        num_key_value_heads=cell.kv_heads,
        num_hidden_layers=1,
    )
    layer.config._attn_implementation = implementation
    return layer


def missing(implementation: str, device: torch.device) -> str | None:
    """Why an implementation cannot be measured here; None if it can."""
    packages = {
        "flash_attention_2": "flash_attn",
        "flash_attention_3": "flash_attn_interface",
        "flash_attention_4": "flash_attn.cute",
    }
    package = packages.get(implementation)
    if package is not None:
        if device.type != "cuda":
            return "runs on CUDA"
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            return f"{package} is not installed"
    elif implementation.startswith("sdpa:"):
        on_cuda = implementation in ("sdpa:efficient", "sdpa:cudnn")
        return "runs on CUDA" if on_cuda and device.type != "cuda" else None
    elif implementation != "eager" and implementation not in ALL_ATTENTION_FUNCTIONS:
        return "Transformers does not know the name"
    return None


def attention_works(cell: Cell, device: torch.device) -> Callable[[str], Work]:
    """Makes of an implementation's name one mask and `layers` attention calls, as a model makes them.

    Query, key and value are the same memory for every implementation: where they lie decides what a cache holds.
    """
    query, key, value = tensors_of(cell, device)
    make_mask = _mask_maker(cell, device)
    scaling = cell.head_dim**-0.5

    def make(implementation: str) -> Work:
        layer = _layer(cell, implementation)
        attend: Any = eager_attention_forward if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]

        def work() -> Any:
            mask = make_mask(implementation, layer.config)
            out = None
            with torch.set_grad_enabled(cell.gradient):
                for _ in range(cell.layers):
                    out = attend(
                        layer, query, key, value, mask, scaling=scaling, dropout=0.0, sliding_window=cell.window
                    )[0]
                    if cell.gradient:
                        torch.autograd.grad(out.sum(), (query, key, value))
            return out

        return work

    return make


def structure_of(cell: Cell, device: torch.device) -> MaskStructure:
    """What each query of a cell may see."""
    mask = _mask_maker(cell, device)("adaattn", _layer(cell, "adaattn").config)
    structure: MaskStructure = mask.structure
    return structure


def _mask_maker(cell: Cell, device: torch.device) -> Callable[[str, Any], Any]:
    padding = padding_of(cell, device)
    function = _mask_function(cell, device)
    offset: Any = cell.keys - cell.q_len if cell.mask == "causal" else 0
    if cell.filled is not None:
        offset = torch.tensor(cell.filled - cell.q_len, dtype=torch.int64, device=device)
    plain = cell.window is None and cell.chunk is None and not cell.packed

    def make(implementation: str, config: Any) -> Any:
        return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation](
            batch_size=cell.batch, q_length=cell.q_len, kv_length=cell.keys, q_offset=offset, kv_offset=0,
            mask_function=function, attention_mask=padding, local_size=cell.window or cell.chunk,
            allow_is_causal_skip=plain and cell.filled is None,
            allow_is_bidirectional_skip=cell.mask == "bidirectional",
            dtype=getattr(torch, cell.dtype), config=config, device=device,
        )  # fmt: skip

    return make


def tensors_of(cell: Cell, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a cell: the same numbers at every call."""
    random = torch.Generator(device).manual_seed(0)  # on the device: gigabytes of a cache would take a host seconds

    def tensor(heads: int, length: int) -> Tensor:
        shape = cell.batch, length, heads, cell.head_dim
        made = torch.randn(shape, generator=random, dtype=torch.float32, device=device)
        leaf = made.to(getattr(torch, cell.dtype)).transpose(1, 2)
        # keys of a cache lie head by head
        leaf = leaf.contiguous() if length != cell.q_len else leaf
        return leaf.detach().requires_grad_(cell.gradient)

    return tensor(cell.heads, cell.q_len), tensor(cell.kv_heads, cell.keys), tensor(cell.kv_heads, cell.keys)


def padding_of(cell: Cell, device: torch.device) -> Tensor | None:
    """Boolean `[batch, keys]`, True at real tokens; None for a cell without padding."""
    if cell.padding is None:
        return None
    mask = torch.ones(cell.batch, cell.keys, dtype=torch.bool, device="cpu")
    for row, length in enumerate(cell.lengths):
        if cell.padding == "left":
            mask[row, : cell.keys - length] = False
        else:
            mask[row, length:] = False
    return mask.to(device)


def _mask_function(cell: Cell, device: torch.device) -> Callable[..., Any]:
    if cell.mask == "bidirectional":
        return masking_utils.bidirectional_mask_function
    function: Callable[..., Any] = masking_utils.causal_mask_function
    if cell.window is not None:
        function = masking_utils.sliding_window_causal_mask_function(cell.window)
    if cell.chunk is not None:
        starts = torch.zeros(cell.batch, dtype=torch.long, device=device)
        function = masking_utils.chunked_causal_mask_function(cell.chunk, starts)
    if cell.packed:
        numbers = torch.repeat_interleave(
            torch.arange(len(cell.packed), device="cpu"), torch.tensor(cell.packed, dtype=torch.int64, device="cpu")
        )
        documents = numbers.expand(cell.batch, -1).to(device)
        function = masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))
    return function
