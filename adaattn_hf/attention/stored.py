"""Keys and values as a cache stores them: eight or four bits to a channel, one small scale per token and head.

    x  is rotated by a Hadamard matrix; keys lose their mean; the result is rounded to  codes * scale

The rotation spreads outliers of single channels over all channels (QuaRot, Ashkboos et al. 2024). Subtracting one
vector from all keys shifts every score of a row by the same amount, which softmax does not see (SageAttention, Zhang
et al. 2024). About half of the queries' energy lies along their mean, so keys are rounded such that their errors cancel
along it. A token's scale depends only on that token. It is a positive 8-bit float with 5 bits of exponent and 3 of
fraction, at least `peak / largest code`, and takes one byte besides the 64 or so that a head's codes take.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kind import BITS
from .tracing import transient

CACHE_FORMATS = ("model", *BITS)
"""Names of all formats that a cache may have; `model` keeps numbers in the model's dtype."""
INT8_LEVELS = 127
"""The largest code of 8 bits: -128 is left out, so that a number and its negative round alike."""

CHANNELS = 32
"""Values of four bits lie in groups of so many channels: 16 low halves of bytes, then the 16 high halves."""

FULL = "max_cache_len: the cache is full, expected room for one token more; make the cache longer"
"""What is said where a token has no room, on whichever device that is found."""

_ZERO = 107 << 23  # bits of the float32 that the code 0 stands for, 2 ** -20


# Not frozen: a frozen dataclass costs microseconds to make, and one is made in every layer.
@dataclass(eq=False, slots=True)
class StoredKV:
    """Dequantisation parameters for the codes in a call's key and value. Never modified.

    The call's `key` holds int8 codes `[batch, num_kv_heads, kv_len, head_dim]`, its `value` int8 codes or, as
    uint8 with half the channels, codes of four bits.

    Attributes:
        key_scale, value_scale: uint8 `[batch, num_kv_heads, kv_len]`, see `encode_scale`.
        key_mean: fp32 `[batch, num_kv_heads, head_dim]`, contiguous, subtracted from the rotated keys.
        first_key: fp32 `[batch, num_kv_heads, head_dim]`, contiguous: key 0 unquantised. Most heads give it much of
            their weight, so rounding it would cost as much as rounding all other keys.
    """

    key_scale: Tensor
    value_scale: Tensor
    key_mean: Tensor | None = None
    first_key: Tensor | None = None

    def tensors(self) -> dict[str, Tensor | None]:
        """All fields by name, in their order."""
        return {name: getattr(self, name) for name in ("key_scale", "value_scale", "key_mean", "first_key")}

    def of_heads(self, heads: Sequence[int]) -> "StoredKV":
        """The record of some key/value heads."""
        tensors = {name: tensor for name, tensor in self.tensors().items() if tensor is not None}
        return StoredKV(**{name: tensor[:, list(heads)].contiguous() for name, tensor in tensors.items()})

    def check_device(self, device: torch.device) -> None:
        """Refuses a record of which a tensor does not lie where its codes do."""
        for name, tensor in self.tensors().items():
            if tensor is not None and tensor.device != device:
                raise ValueError(
                    f"stored.{name}: got a tensor on {tensor.device} for codes on {device}, expected one device; move "
                    "the whole cache, not a part of it"
                )

    def keys(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The keys that the codes stand for; as much memory as they would take unstored."""
        numbers = dequantise(codes, self.key_scale)
        if self.key_mean is not None:
            numbers = numbers + self.key_mean[:, :, None]
        numbers = numbers @ hadamard(numbers.shape[3], numbers.device)
        if self.first_key is not None and numbers.shape[2]:
            numbers[:, :, 0] = self.first_key
        return numbers.to(dtype)

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The values that the codes stand for; as much memory as they would take unstored."""
        numbers = dequantise(codes, self.value_scale)
        return (numbers @ hadamard(numbers.shape[3], numbers.device)).to(dtype)


def hadamard(n: int, device: torch.device | str = "cpu") -> Tensor:
    """The orthogonal, symmetric `[n, n]` Hadamard matrix in fp32: its own inverse.

    Where `n` is no power of two it is made of blocks as large as the largest power of two that divides `n`.
    """
    return (_matrix if transient() else _kept_matrix)(n, device)


def _matrix(n: int, device: torch.device | str) -> Tensor:
    block = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while block.shape[0] < n & -n:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    matrix: Tensor = torch.block_diag(*[block / block.shape[0] ** 0.5] * (n // block.shape[0]))
    return matrix.to(device)


# a matrix made in inference mode would be of no use to a gradient later
_kept_matrix = functools.lru_cache(maxsize=32)(torch.inference_mode(False)(_matrix))


def encode_scale(scale: Tensor) -> Tensor:
    """The smallest number of eight bits that is not below each fp32 scale (between 2^-20 and 3840), as uint8."""
    bits = scale.float().contiguous().view(torch.int32).long()
    return ((bits - _ZERO + (1 << 20) - 1) >> 20).clamp_(0, 255).to(torch.uint8)


def decode_scale(code: Tensor) -> Tensor:
    """The fp32 numbers that uint8 scales stand for: exponent and fraction moved to their place."""
    return ((code.to(torch.int32) << 20) + _ZERO).view(torch.float32)


def direction_of(queries: Tensor, kv_heads: int) -> Tensor:
    """Unit vectors along the mean query of each key/value head, for `quantise`: fp32 `[batch, kv_heads, head_dim]`.

    Of the queries `[batch, heads, n, head_dim]`, two at least, the first, which sees only one key, is left out.
    """
    mean = queries[:, :, 1:].mean(dim=2, dtype=torch.float32).unflatten(1, (kv_heads, -1)).mean(dim=2)
    return torch.nn.functional.normalize(mean @ hadamard(mean.shape[2], mean.device), dim=2)


def mean_of(keys: Tensor) -> Tensor:
    """The mean of keys `[batch, kv_heads, n, head_dim]`, rotated, for `quantise`: `[batch, kv_heads, head_dim]`."""
    return (keys.float().mean(dim=2) @ hadamard(keys.shape[3], keys.device)).contiguous()


def cancelled(codes: Tensor, steps: Tensor, along: Tensor) -> Tensor:
    """Codes whose errors cancel along a direction: up to three codes of a token are rounded the other way.

    Greedily minimises `|e|^2 + head_dim / 2 * (e . along)^2` over the errors `e`, one code at a time. `codes` `[batch,
    heads, n, head_dim]` are the `steps` rounded to nearest; `along` `[batch, heads, head_dim]` has length 1.
    """
    weight, along = codes.shape[3] / 2, along[:, :, None]
    for _ in range(3):
        error = codes - steps
        off = (error * along).sum(dim=3, keepdim=True)
        sign = (error > 0).to(error.dtype) * 2 - 1
        cost = weight * ((off - sign * along) ** 2 - off**2) + 1 - 2 * error.abs()
        least, at = cost.masked_fill((codes - sign).abs() > INT8_LEVELS, torch.inf).min(dim=3, keepdim=True)
        codes = codes.scatter_add(3, at, -sign.gather(3, at) * (least < 0))
    return codes


def quantise(
    x: Tensor, *, bits: int = 8, mean: Tensor | None = None, along: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of tokens, which are rotated by `hadamard(head_dim)` first.

    Args:
        x: `[batch, heads, n, head_dim]`.
        bits: 8, or 4: odd numbers between -15 and 15, two to a byte.
        mean: fp32 `[batch, heads, head_dim]`, subtracted after the rotation.
        along: Unit vectors of that shape, in rotated coordinates: errors of 8-bit codes cancel along them.

    Returns:
        int8 `[batch, heads, n, head_dim]` (of four bits: uint8 with half the channels), uint8 `[batch, heads, n]`.
    """
    x = x.float() @ hadamard(x.shape[3], x.device)
    if mean is not None:
        x = x - mean[:, :, None]
    scale = encode_scale(x.abs().amax(dim=3) * (1 / INT8_LEVELS if bits == 8 else 1 / 15))
    steps = x * (1 / decode_scale(scale))[..., None]
    if bits == 8:
        codes = steps.round().clamp_(-INT8_LEVELS, INT8_LEVELS)
        return (codes if along is None else cancelled(codes, steps, along)).to(torch.int8), scale
    halves = ((steps + 15) * 0.5).round().clamp_(0, 15).to(torch.uint8)
    halves = halves.unflatten(3, (-1, 2, CHANNELS // 2))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(3), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """`codes * scale` in fp32, `[batch, heads, n, head_dim]`, of codes of eight or four bits."""
    if codes.dtype is torch.uint8:
        pairs = codes.unflatten(3, (-1, CHANNELS // 2))
        codes = torch.stack([pairs & 15, pairs >> 4], dim=4).flatten(3).to(torch.int8) * 2 - 15
    return codes.float() * decode_scale(scale)[..., None]
