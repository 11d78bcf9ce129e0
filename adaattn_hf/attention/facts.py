"""What a structure says of the kind of its calls: hashable facts, in which lengths are rounded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .structure import CallStructure


def keys_class(keys: int) -> int:
    """A number of keys, rounded down to what choices depend on: a power of two, or 384."""
    return 384 if 384 <= keys < 512 else 1 << keys.bit_length() >> 1


class Facts(NamedTuple):
    """What a structure says of the kind of its calls; fields are those of `CallSpec`.

    `sinks_at_runs` is that of the structure; `keys` are rounded whatever the device.
    """

    kind: str
    windowed: bool
    window_sinks: bool
    decode: bool
    holes: bool | None
    packed: int
    aligned: bool
    sinks_at_runs: bool
    keys: int

    @classmethod
    def of(cls, structure: CallStructure, look: bool) -> Facts:
        """The facts of a structure; `look` at padding, for which the host may have to wait for a device."""
        kind, holes, packed, aligned = structure.kind, None, 0, True
        keys = structure.kv_len
        known = type(structure.q_len) is type(keys) is int  # in torch.jit.trace extents are tensors
        if look and kind == "ragged" and known:
            holes, aligned = structure.segments() is None, structure.aligned
            packed = 1 << structure.longest_packed.bit_length() >> 1
            # kernels that walk runs are no better off than with a dense mask
            kind = "irregular" if holes else kind
        # a compiled graph would be guarded by the class of its lengths
        fixed = known and not torch.compiler.is_compiling()
        return cls(
            kind, structure.window is not None and structure.windowed, structure.sinks > 0, structure.q_len == 1,
            holes, packed, aligned, structure.sinks_at_runs, keys_class(keys) if fixed else 0,
        )  # fmt: skip
