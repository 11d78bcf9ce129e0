"""Continuous batching: attention over the requests that Transformers' engine packs into one row, and its name there.

    with adaattn_hf.continuous_batching(model):
        answers = model.generate_batch(prompts, generation_config=settings)

Keys and values are the engine's, which has read them from its paged cache. Requests of one new token are one batch of
decode steps over the row of all keys; those of several tokens are packed documents, each aligned at its last key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from adaattn_hf.attention.runs import Runs, aligned_runs
from adaattn_hf.attention.structure import Segment
from adaattn_hf.attention.tap import SEATED
from adaattn_hf.backends.base import capturing

from ..mask.structured_mask import StructuredMask
from .interface import AttentionFunction, attention_function
from .keywords import HARMLESS
from .refusals import check_untransformed, refuse_unknown

_KNOWN = "_adaattn_parts"


def engine_name(name: str) -> str:
    """The name under which the installed engine calls the function of an `attn_implementation`.

    Transformers 5.17 and 5.18 put `paged|` in front of a name; later ones let in names that hold `flash`.
    """
    return f"paged|{name}" if "paged|sdpa" in AttentionInterface._global_mapping else f"{name}|flash"


@contextmanager
def continuous_batching(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block `generate_batch` and continuous batching's manager run a model by this package.

    Transformers' engine knows attention by name and refuses `adaattn`, or where flash-attn is installed changes the
    model to it, which drops a plan. In the block the configuration holds a name that the engine lets in; behind the
    block, and after an exception, it is the old one. The model's plan runs, and outputs are those of `generate`. A
    manager that was started in the block must be stopped in it. All other calls of the model wait for its end.

    Args:
        model: A model set to `adaattn…`.

    Raises:
        ValueError: None of its towers is set to `adaattn…`.
    """
    from ..models.support import is_ours, refuse_other_attention

    refuse_other_attention(model)
    owners = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    named = {key: getattr(config, "_attn_implementation", None) for key, config in owners.items()}
    try:
        for key, name in named.items():
            if is_ours(name) and "|" not in name:
                owners[key]._attn_implementation = {"": engine_name(name)}
        yield
    finally:
        for key, name in named.items():
            if is_ours(name):
                owners[key]._attn_implementation = {"": name}


def batch_function(backend: str | None = None) -> AttentionFunction:
    """The function to register under `engine_name`.

    Args:
        backend: Name of the backend to use for every call, or None to choose one per kind of call.
    """
    attend = attention_function(backend)

    def adaattn_batch(
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

        Raises:
            ValueError: The call is not a step of continuous batching, passes a block table or a mask, or asks for what
                the requests of a batch are not served with.
            BackendRefusal: A function transform is at work.
            PlanError: Some thread runs the model with another plan (`use_plan`).
        """
        if torch.compiler.is_compiling():
            from .uncompiled import continuous_batching_runs_outside_graphs

            told: tuple[Tensor, None] = continuous_batching_runs_outside_graphs(
                adaattn_batch, module, query, key, value, attention_mask, dropout, scaling, is_causal,
                sliding_window=sliding_window, softcap=softcap, s_aux=s_aux, cache=cache, **kwargs,
            )  # fmt: skip
            return told
        _refuse(module, attention_mask, dropout, is_causal, kwargs)
        window = sliding_window or getattr(module, "sliding_window", None) or None
        if cache is not None:
            key, value = _updated(cache, key, value, module, kwargs)
        borders = kwargs["cu_seq_lens_k"]
        if isinstance(borders, dict):
            borders = borders["full_attention" if window is None else "sliding_attention"]
        parts = _parts(kwargs["cu_seq_lens_q"], borders, query.shape[2], key.shape[2], window, _limit(module))
        out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))
        for rows, structure in parts:
            asked = query[:, :, rows]
            if structure.q_len == 1:  # one batch row for each request, all of which read the one row of keys
                asked = asked.transpose(0, 2)
            batch = structure.batch
            answer, _ = attend(
                module, asked, key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1),
                StructuredMask(structure, query.device), 0.0, scaling, softcap=softcap, s_aux=s_aux,
            )  # fmt: skip
            out[:, rows] = answer.transpose(0, 1) if structure.q_len == 1 else answer
        return out, None

    return adaattn_batch


def _refuse(
    module: nn.Module, mask: Any, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    """Refuses what is no step of continuous batching, before the cache is written to; see `batch_function`."""
    from adaattn_hf.plans.record import PlanError

    if kwargs.get("cu_seq_lens_q") is None or kwargs.get("read_index") is None:
        raise ValueError(
            f"attn_implementation: {type(module).__name__} is inside `with adaattn_hf.continuous_batching(model):`, "
            "which serves steps of continuous batching alone; leave the block for everything else"
        )
    refuse_unknown(module, kwargs, _known())
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
                "cu_seq_lens_q and cu_seq_lens_k, are causal and generated without dropout, and their keys are read "
                "before attention; use 'adaattn' for everything else"
            )
    check_untransformed("generate_batch")
    if getattr(module, SEATED, False):
        raise PlanError(
            "use_plan: generate_batch() serves its requests in a thread of its own, which no block of another "
            "thread reaches; use generate() inside the block, or give the model the plan "
            "with adaattn_hf.load_plan(model)"
        )
    if capturing(kwargs["cu_seq_lens_q"].device):
        raise ValueError(
            "use_cuda_graph: got a step of continuous batching that is captured, expected one that runs: the lengths "
            "of its requests are read on the host; pass "
            "continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False)"
        )


@functools.cache
def _known() -> frozenset[str]:
    """Keywords of a step: what models say of themselves, and whatever the installed engine declares to hand over."""
    from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

    return HARMLESS | PagedAttentionArgs.__annotations__.keys()


def _updated(
    cache: Any, key: Tensor, value: Tensor, module: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Writes new keys and values to the engine's cache and returns all, `[1, num_kv_heads, kv_len, head_dim]`.

    So do steps of Transformers 5.17 to 5.23; from 5.24 on the model has done it.
    """
    if "kwargs" in inspect.signature(cache.update).parameters:  # it selects what belongs to the layer there
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )
        return key, value
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx,
        read_index=kwargs["read_index"], write_index=kwargs["write_index"],
    )  # fmt: skip
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def _limit(module: nn.Module) -> int | None:
    """Position in a request up to which the module's plan speaks; None without one."""
    from ..plans.attach import program_of

    program = program_of(module)
    return None if program is None else program.max_length


class Part(NamedTuple):
    """Requests that are computed together.

    Attributes:
        rows: Their queries among those of the step.
        structure: What they see of the row of all keys.
    """

    rows: slice | Tensor
    structure: Runs


def _parts(
    cu_q: Tensor, cu_k: Tensor, q_len: int, kv_len: int, window: int | None, limit: int | None
) -> tuple[Part, ...]:
    """The parts of a step, made once for the layers that are handed the same lengths.

    Args:
        cu_q, cu_k: `[requests + 1]` running sums of queries and keys; the last query stands at the last key.
        q_len, kv_len: Tokens of the step, and keys that its requests read.
        window: Of the layer.
        limit: Requests within the lengths of a plan, and those beyond, are computed apart.
    """
    versions = tuple(0 if t.is_inference() else t._version for t in (cu_q, cu_k))
    known = cu_q.__dict__.setdefault(_KNOWN, {})
    asked = id(cu_k), versions, kv_len, window, limit
    if asked not in known:
        runs = aligned_runs(cu_q.tolist(), cu_k.tolist(), q_len, kv_len, True)
        alike: dict[tuple[bool, bool, bool], list[Segment]] = {}
        for run in runs:
            within = limit is None or run.offset + run.q_len <= limit
            beyond = limit is not None and run.offset >= limit
            alike.setdefault((run.q_len == 1, within, beyond), []).append(run)
        # the lengths are kept so that their identity stays theirs
        found = tuple(_part(group, steps, kv_len, window, cu_q) for (steps, *_), group in alike.items())
        known[asked] = cu_k, found
    parts: tuple[Part, ...] = known[asked][1]
    return parts


def _part(group: Sequence[Segment], steps: bool, kv_len: int, window: int | None, cu_q: Tensor) -> Part:
    """One batch row for each decode step, or one row for all other requests."""
    first, last = group[0].q_start, group[-1].q_start + group[-1].q_len
    count = sum(run.q_len for run in group)
    rows: slice | Tensor = slice(first, last)
    if count != last - first:
        rows = torch.cat([torch.arange(run.q_start, run.q_start + run.q_len) for run in group]).to(
            cu_q.device
        )
    if steps:
        runs = [run._replace(row=row, q_start=0) for row, run in enumerate(group)]
        return Part(rows, Runs.of(runs, len(group), 1, kv_len, True, window))
    at, runs = 0, []
    for run in group:
        runs.append(run._replace(q_start=at))
        at += run.q_len
    return Part(rows, Runs.of(runs, 1, count, kv_len, True, window))
