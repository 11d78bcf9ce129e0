"""One step of continuous batching: attention over the requests that Transformers' engine packs into one row.

Requests of one new token are one batch of decode steps over the row of all keys; those of several tokens are packed
documents. The last query of each request stands at its last key.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

from adaattn_hf.attention.runs import Runs, aligned_runs
from adaattn_hf.attention.structure import Segment
from adaattn_hf.backends.base import capturing
from adaattn_hf.plans.record import PlanError

from ..mask.structured_mask import StructuredMask
from ..plans.bound import checked_layer
from ..plans.slots import BLOCKS
from .interface import attention_function
from .keywords import IGNORED_KEYWORDS
from .refusals import check_untransformed, refuse_unknown

_KNOWN = "_adaattn_sums"


def attend_requests(
    backend: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the output `[1, q_len, heads, head_dim_v]` of all requests; tokens of no request are zero.

    `cache` is the engine's paged cache, in Transformers before 5.24, whose models do not write to it themselves.
    ValueError for what is no step of continuous batching or not served in one, BackendRefusal under a function
    transform, PlanError where some thread runs the model with another plan (`use_plan`).
    """
    _refuse(module, attention_mask, dropout, is_causal, kwargs)
    window = sliding_window or getattr(module, "sliding_window", None) or None
    if cache is not None:
        key, value = _updated(cache, key, value, module, kwargs)
    borders = kwargs["cu_seq_lens_k"]
    if isinstance(borders, dict):
        borders = borders["full_attention" if window is None else "sliding_attention"]
    q_len, kv_len, attend = query.shape[2], key.shape[2], attention_function(backend)
    bound_layer = checked_layer(module)
    limit = None if bound_layer is None else bound_layer.max_length
    # the keys of a layer that slides do not tell how long a request is
    positions = None if limit is None or window is None else kwargs.get("position_ids", query)
    if positions is query:
        raise ValueError(
            f"position_ids: got none from {type(module).__name__}, which slides under a plan in a step of continuous "
            "batching, expected the place of each token; remove the plan with adaattn_hf.remove_plan(model)"
        )
    parts = _parts(kwargs["cu_seq_lens_q"], borders, positions, q_len, kv_len, window, limit)
    alone = len(parts) == 1 and parts[0].structure.batch * parts[0].structure.q_len == q_len
    out = query if alone else query.new_zeros((1, q_len, query.shape[1], value.shape[3]))
    for rows, structure in parts:
        batch, steps = structure.batch, structure.q_len == 1
        asked = query if alone else query[:, :, rows]
        answer, _ = attend(
            module, asked.transpose(0, 2) if steps else asked, key.expand(batch, -1, -1, -1),
            value.expand(batch, -1, -1, -1), StructuredMask(structure, query.device), 0.0, scaling,
            softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
        answer = answer.transpose(0, 1) if steps else answer
        if alone:
            return answer, None
        out[:, rows] = answer
    return out, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def continuous_batching_runs_outside_graphs(*given: Any, **told: Any) -> tuple[Tensor, None]:
    """Runs it outside a compiled graph, as the lengths of requests are read on the host; named for torch's errors."""
    return attend_requests(*given, **told)


def _refuse(module: nn.Module, mask: Any, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]) -> None:
    borders = kwargs.get("cu_seq_lens_q")
    if borders is None or kwargs.get("read_index") is None:
        raise ValueError(
            f"attn_implementation: {type(module).__name__} is inside `with adaattn_hf.continuous_batching(model):`, "
            "which supports only steps of continuous batching; leave the block for everything else, and run a copy "
            'that was made in it behind copied.set_attn_implementation("adaattn")'
        )
    declared = PagedAttentionArgs.__annotations__
    refuse_unknown(module, {name: kwargs[name] for name in kwargs.keys() - declared}, IGNORED_KEYWORDS)
    asked = {
        "attention_mask": mask is not None and "a mask",
        "block_table": kwargs.get("block_table") is not None and "a table",
        "dropout": dropout,
        "is_causal": is_causal is False and "False",
    }
    for name, got in asked.items():
        if got:
            raise ValueError(
                f"{name}: got {got} in a step of continuous batching, expected none: requests are told apart by "
                "cu_seq_lens_q and cu_seq_lens_k, their keys are in order, causal, and read without dropout; "
                "set max_blocks_per_request=0 so that no table is passed, and leave the block for everything else"
            )
    check_untransformed("generate_batch")
    if getattr(module, BLOCKS, False):
        raise PlanError(
            "use_plan: generate_batch() serves its requests in a thread of its own, which no block of another "
            "thread reaches; use generate() inside the block, or give the model the plan "
            "with adaattn_hf.load_plan(model)"
        )
    if capturing(borders.device):
        raise ValueError(
            "use_cuda_graph: got True in continuous batching, expected False, as the lengths of requests are read on "
            "the host; pass continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)"
        )


def _updated(cache: Any, key: Tensor, value: Tensor, module: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    new = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    if "kwargs" in inspect.signature(cache.update).parameters:  # from 5.19 on; it selects the layer's lengths, too
        key, value = cache.update(**new, kwargs=kwargs)
        return key, value
    key, value = cache.update(**new, read_index=kwargs["read_index"], write_index=kwargs["write_index"])
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


class Part(NamedTuple):
    """Requests that are computed together: their queries among the step's, what they see of the row of all keys."""

    rows: slice | Tensor
    structure: Runs


def _parts(
    cu_q: Tensor, cu_k: Tensor, positions: Tensor | None, q_len: int, kv_len: int, window: int | None, limit: int | None
) -> tuple[Part, ...]:
    """The parts of a step by running sums `[requests + 1]`, made once for all layers; beyond a limit they are apart."""
    (queries, known), (keys, _) = _read(cu_q), _read(cu_k)
    asked = id(keys), kv_len, window, limit
    if asked not in known:
        places = None if positions is None else _read(positions)[0][0]
        alike: dict[tuple[bool, bool, bool], list[tuple[Segment, int]]] = {}
        for run in aligned_runs(queries, keys, q_len, kv_len, True):
            first = run.offset if places is None else places[run.q_start]
            within, beyond = limit is None or first + run.q_len <= limit, limit is not None and first >= limit
            alike.setdefault((run.q_len == 1, within, beyond), []).append((run, first))
        parts = tuple(_part(group, kv_len, window, cu_q.device) for group in alike.values())
        known[asked] = keys, parts  # the lengths are kept so that their identity stays theirs
    found: tuple[Part, ...] = known[asked][1]
    return found


def _read(sums: Tensor) -> tuple[list[Any], dict[Any, Any]]:
    """Running sums or positions of a step, for which the host waits once, and what was made of them for all layers."""
    # tensors made in inference mode do not count writes: these are taken to be made anew for every step
    version = 0 if sums.is_inference() else sums._version
    held = sums.__dict__.get(_KNOWN)
    if held is None or held[0] != version:
        held = sums.__dict__[_KNOWN] = version, sums.tolist(), {}
    return held[1], held[2]


def _part(found: Sequence[tuple[Segment, int]], kv_len: int, window: int | None, device: torch.device) -> Part:
    group, firsts = zip(*found, strict=True)
    steps, runs, count = group[0].q_len == 1, [], 0
    for run in group:
        runs.append(run._replace(row=count, q_start=0) if steps else run._replace(q_start=count))
        count += run.q_len
    first, last = group[0].q_start, group[-1].q_start + group[-1].q_len
    rows: slice | Tensor = slice(first, last)
    if count != last - first:
        places = [torch.arange(run.q_start, run.q_start + run.q_len, device="cpu") for run in group]
        rows = torch.cat(places).to(device)
    batch, q_len = (count, 1) if steps else (1, count)
    structure = Runs.of(runs, batch, q_len, kv_len, True, window)
    structure.firsts = firsts
    return Part(rows, structure)
