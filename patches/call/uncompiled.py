"""Runs attention outside compiled graphs: with `use_plan`, with streaming heads, and in continuous batching."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def use_plan_runs_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls an attention function outside the graph; with `fullgraph=True` torch's error shows this function's name."""
    return attention(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def streaming_heads_run_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same for a cache whose heads keep tokens of their own: what is written and read is counted on the host."""
    return attention(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def continuous_batching_runs_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same for requests that are packed into one row, whose lengths are read on the host."""
    return attention(*args, **kwargs)
