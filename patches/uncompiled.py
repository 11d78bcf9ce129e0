"""Calls that leave a compiled graph: a graph cannot follow `use_plan`, whose plan is that of the calling thread."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["use_plan_runs_outside_graphs"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def use_plan_runs_outside_graphs(attention: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls an attention function outside the graph; where the graph must be whole, the refusal has this name."""
    return attention(*args, **kwargs)
