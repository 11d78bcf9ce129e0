"""Which calls the kernels for Hopper serve, and what they are launched with."""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import torch
import triton

from ..base import installed
from ..capability import capability
from .launcher import Launcher

_TRIED = (3, 6)
"""The first version of Triton whose Gluon these kernels were compiled with."""
_SM = (9, 0)
"""Devices with both TMA and the products of four warps that the kernels are made of."""
_LEAST_OF_WINDOWS = 1950
"""Keys that queries of 64 channels see on average, some 100 fewer than blocks of them read, from which on windows gain
by these kernels. With windows of 1,024 everywhere they take 1.1 times as long as the kernel whose tiles have 64 keys
where other kernels ran between, as that is far less code to fetch again; of 8 sequences at once 0.9 times as long,
windows of 512 0.93 times."""
_LEAST_OF_ROWS = 640
"""The same without windows where all groups of warps have rows of one head, 192 an item: in documents of 1,000 tokens
smaller blocks, of the other kernel, take 0.9 times as long."""
_MANY_TURNS = 16
"""Items of a program from which on a quarter of the keys of windows is enough: how it begins matters little then."""


class Warps(NamedTuple):
    """How a kernel's warps share its work out.

    Attributes:
        groups: Of four warps, with 64 queries each.
        together: Heads of a group of query heads that a program computes: one for each group of warps, or one.
        columns: Keys of a tile.
        stages: Tiles in a ring.
        alternate: Whether the groups begin their products one after the other.
        ahead: Whether queries come an item ahead.
        least: Keys that queries must see on average; with fewer, too many rows or tiles are at edges.
        least_of_many: The same where each of the programs computes many items.
    """

    groups: int
    together: int
    columns: int
    stages: int
    alternate: bool
    ahead: bool = False
    least: int = 0
    least_of_many: int = 0

    def pays(self, pairs: int, queries: int, groups: int, programs: int) -> bool:
        """Whether queries see enough keys.

        `pairs` of queries and keys, and `queries`, are those of all key/value heads, with `groups` query heads each.
        """
        many = _MANY_TURNS * programs * 64 * self.groups <= queries * groups
        return pairs >= (self.least_of_many if many else self.least) * queries

    @property
    def rows(self) -> int:
        """Queries of a work entry."""
        return 64 * self.groups // self.together


def warps_of(dim: int, groups: int, windows: bool) -> Warps | None:
    """How the warps of a dense call, or one with windows, share it out, as measured on an H200; None where they lose.

    Keys and values have `dim` channels.
    """
    if dim == 128:
        return Warps(2, 1, 128, 2, windows, ahead=True)
    if dim == 64:
        together = 3 if groups % 3 == 0 else 1
        # to bring queries ahead is code that has to be fetched again: 1 to 2 % slower here, 2 to 7 % faster above
        least = _LEAST_OF_WINDOWS if windows else 0 if together > 1 else _LEAST_OF_ROWS
        return Warps(3, together, 128, 2, True, least=least, least_of_many=least // 4 if windows else least)
    return None


def usable(device: torch.device) -> bool:
    """Whether the kernels run on a device with the Triton that is installed."""
    facts = capability(device) if device.type == "cuda" and _installed() else None
    return facts is not None and facts.sm == _SM


@functools.cache
def _installed() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= _TRIED and bool(installed("triton.experimental.gluon"))


@functools.cache
def launch_specialised() -> Launcher:
    """Of the kernel for dense calls and windows, which is imported with the first call."""
    return Launcher(importlib.import_module(f"{__package__}.specialised").specialised)
