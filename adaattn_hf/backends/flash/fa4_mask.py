"""Masks compiled into flash-attn 4's kernels: which keys a query sees under its head's window and sinks.

Imported with the first such call, since it needs the package. `tables` are int32: windows and sinks of the query
heads, then, for calls of runs, where each query's run of keys begins and ends and where the query stands among keys.
"""

from __future__ import annotations

import warnings
from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute.utils import scalar_to_ssa

# its compiler says so of every mask that it cannot take as a launch's argument, and compiles it in
warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)


@cute.jit
def causal(batch: Any, head: Any, row: Any, key: Any, lengths: Any, tables: Any) -> Any:
    """Causal: the last query stands at the last key."""
    window = scalar_to_ssa(tables[0][head[0]], cutlass.Int32)
    sinks = scalar_to_ssa(tables[1][head[0]], cutlass.Int32)
    place = row + scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
    return (key <= place) & ((place - key < window) | (key < sinks))


@cute.jit
def both_ways(batch: Any, head: Any, row: Any, key: Any, lengths: Any, tables: Any) -> Any:
    """Both directions: queries and keys are the same tokens."""
    window = scalar_to_ssa(tables[0][head[0]], cutlass.Int32)
    sinks = scalar_to_ssa(tables[1][head[0]], cutlass.Int32)
    return ((row - key < window) & (key - row < window)) | (key < sinks)


@cute.jit
def causal_runs(batch: Any, head: Any, row: Any, key: Any, lengths: Any, tables: Any) -> Any:
    """Causal within runs (documents, or rows without their padding)."""
    window = scalar_to_ssa(tables[0][head[0]], cutlass.Int32)
    sinks = scalar_to_ssa(tables[1][head[0]], cutlass.Int32)
    first = scalar_to_ssa(tables[2][batch[0], row[0]], cutlass.Int32)
    place = scalar_to_ssa(tables[4][batch[0], row[0]], cutlass.Int32)
    return (key >= first) & (key <= place) & ((place - key < window) | (key - first < sinks))


@cute.jit
def both_ways_runs(batch: Any, head: Any, row: Any, key: Any, lengths: Any, tables: Any) -> Any:
    """Both directions within runs."""
    window = scalar_to_ssa(tables[0][head[0]], cutlass.Int32)
    sinks = scalar_to_ssa(tables[1][head[0]], cutlass.Int32)
    first = scalar_to_ssa(tables[2][batch[0], row[0]], cutlass.Int32)
    stop = scalar_to_ssa(tables[3][batch[0], row[0]], cutlass.Int32)
    place = scalar_to_ssa(tables[4][batch[0], row[0]], cutlass.Int32)
    near = ((place - key < window) & (key - place < window)) | (key - first < sinks)
    return (key >= first) & (key < stop) & near
