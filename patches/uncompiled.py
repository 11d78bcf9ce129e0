"""Calls that leave a compiled graph: `use_plan`, whose plan is that of the calling thread, and streaming heads."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["streaming_heads_run_outside_graphs", "use_plan_runs_outside_graphs"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def use_plan_runs_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls an attention function outside the graph; where the graph must be whole, the refusal has this name."""
    return attention(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def streaming_heads_run_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The same for a cache whose heads keep tokens of their own: what is written and read is counted on the host."""
    return attention(*args, **kwargs)
