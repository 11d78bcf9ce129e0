"""One step of continuous batching: attention over the requests that Transformers' engine packs into one row.

A step in which each request has one new token comes with a table of pages (`block_table`): it reads keys where they
lie, its lengths stay on the device, and a CUDA graph may hold it. In any other, and where no kernel reads pages, the
lengths are read on the host: requests of one new token are one batch of decode steps over the row of all keys, those
of several are packed documents. The last query of each request stands at its last key.

What decides in the engine, in Transformers 5.17 to 5.24 (`generation/continuous_batching/initialization.py`): tables of
pages are for a name with `flash` before a 2 or 3 whose `flash_attn_with_kvcache` it can import, where no layer slides;
CUDA graphs and asynchronous batching by default for names with `flash` that need no mask, and wherever the settings ask
for them, graphs for steps with prompts and for those with a table apart. `EngineSettings` is how ours asks.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.pages import Pages
from adaattn_hf.attention.runs import Runs, aligned_runs
from adaattn_hf.attention.structure import Segment
from adaattn_hf.backends.base import capturing
from adaattn_hf.plans.record import PlanError

from ..mask.structured_mask import StructuredMask
from ..plans.bound import checked_layer
from ..plans.slots import BLOCKS
from .interface import UNREAD, attend_ordinary, attention_function
from .refusals import IGNORED_KEYWORDS, check_untransformed, refuse_unknown

Part = tuple[slice | Tensor, Runs]
"""Requests that are computed together: their queries among the step's, what they see of the row of all keys."""
_SUMS, _PAGES = "_adaattn_sums", "_adaattn_pages"
_ASKED_IN_BETWEEN = "cuda_graph_booleans", "q_padding_interval_size", "max_requests_per_batch"
"""Read when buffers are new, before a padded step with prompts is filled in, and before any other padded step."""
_DECLARED = PagedAttentionArgs.__annotations__.keys() | {"k_cache", "v_cache"}  # by the cache, behind its update


@dataclass
class EngineSettings(ContinuousBatchingConfig):
    """Settings by which the engine hands over tables of pages, and fills its buffers after it has cleared them.

    It works on a copy of its own, where it sets `max_blocks_per_request` to 0 for all names but flash-attn's, and for
    layers that slide, which it has no tables for: `keeps_tables` is False there.
    """

    keeps_tables: bool = True

    def __deepcopy__(self, memo: Any) -> EngineSettings:
        """The engine's copy."""
        copied = copy.copy(self)
        copied.__dict__["_of_engine"] = True
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field; in the engine's copy tables are not taken away."""
        taken = name == "max_blocks_per_request" and value == 0
        if not (taken and self.keeps_tables and "_of_engine" in self.__dict__):
            super().__setattr__(name, value)

    def __getattribute__(self, name: str) -> Any:
        """Returns a field; of some the engine learns only once the current stream has nothing left to do.

        It clears the buffers of asynchronous batching on this stream and fills them on another, which does not
        wait (Transformers 5.17 to 5.24): on a busy device the first inputs were cleared again, so that a prompt's first
        tokens were never written. A manager that was warmed up, or is started again, clears them once more.
        """
        if name in _ASKED_IN_BETWEEN:
            _wait_for_stream()
        return super().__getattribute__(name)


def _wait_for_stream() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def engine_settings(model: nn.Module) -> EngineSettings:
    """Settings of the engine for a model: tables of pages and graphs of their steps on CUDA.

    Where some layer slides the engine has no tables. Steps with prompts are not captured, so that nothing is padded.
    With graphs goes asynchronous batching, by the engine's own rule, if the settings say nothing of it.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None) or [getattr(config, "sliding_window", None) or "full_attention"]
    if set(kinds) != {"full_attention"}:
        return EngineSettings(use_cuda_graph=False, keeps_tables=False)
    if next(model.parameters()).device.type != "cuda":
        return EngineSettings(use_cuda_graph=False, max_blocks_per_request=0)
    return EngineSettings(use_cuda_graph=(False, True), q_padding_interval_size=1, kv_padding_interval_size=1)


def attend_requests(
    backend: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the output `[1, q_len, heads, head_dim_v]` of all requests; tokens of no request are zero.

    Among `kwargs` are those that `interface` names, and `cache`, the engine's paged cache, in Transformers before 5.24,
    whose models do not write to it themselves.
    ValueError for what is no step of continuous batching or not served in one, BackendRefusal under a function
    transform, PlanError where some thread runs the model with another plan (`use_plan`).
    """
    named = "is_causal", "sliding_window", "softcap", "s_aux", "cache"
    is_causal, window, softcap, s_aux, cache = (kwargs.pop(name, None) for name in named)
    _refuse(module, attention_mask, dropout, is_causal, kwargs)
    window = window or getattr(module, "sliding_window", None) or None
    if cache is not None:
        key, value = _updated(cache, key, value, module, kwargs)
    borders = kwargs["cu_seq_lens_k"]
    if isinstance(borders, dict):
        borders = borders["full_attention" if window is None else "sliding_attention"]
    if kwargs.get("block_table") is not None:
        pages, numbers = _pages(borders, window, kwargs), (kwargs["k_cache"], kwargs["v_cache"])
        new = key.transpose(0, 2), value.transpose(0, 2)
        keys, values = (_row(tensor).transpose(0, 1).expand(len(new[0]), -1, -1, -1) for tensor in numbers)
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sink_logits": s_aux, "new_tokens": new}
        call = AttentionCall(query.transpose(0, 2), keys, values, UNREAD, **options)
        output = attend_ordinary(module, call, StructuredMask(pages, query.device), None, backend, {})
        if output is not None:
            return output.transpose(0, 1), None
        key, value = (_gathered(pages, *pair) for pair in zip(numbers, new, strict=True))
    _refuse_capture(borders.device)
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
    alone = len(parts) == 1 and parts[0][1].batch * parts[0][1].q_len == q_len
    out = query if alone else query.new_zeros((1, q_len, query.shape[1], value.shape[3]))
    for rows, structure in parts:
        batch, steps = structure.batch, structure.q_len == 1
        part = query if alone else query[:, :, rows]
        output, _ = attend(
            module, part.transpose(0, 2) if steps else part, key.expand(batch, -1, -1, -1),
            value.expand(batch, -1, -1, -1), StructuredMask(structure, query.device), 0.0, scaling,
            softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
        output = output.transpose(0, 1) if steps else output
        if alone:
            return output, None
        out[:, rows] = output
    return out, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def continuous_batching_runs_outside_graphs(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Runs it outside a compiled graph, as the lengths of requests are read on the host; named for torch's errors."""
    return attend_requests(*args, **kwargs)


def _refuse(module: nn.Module, mask: Any, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]) -> None:
    if any(kwargs.get(name) is None for name in ("cu_seq_lens_q", "cu_seq_lens_k", "read_index")):
        raise ValueError(
            f"attn_implementation: {type(module).__name__} is inside `with adaattn_hf.continuous_batching(model):`, "
            "which supports only steps of continuous batching; leave the block for everything else, and run a copy "
            'that was made in it behind copied.set_attn_implementation("adaattn")'
        )
    refuse_unknown(module, {name: kwargs[name] for name in kwargs.keys() - _DECLARED}, IGNORED_KEYWORDS)
    arguments = {
        "attention_mask": mask is not None and "a mask",
        "dropout": dropout,
        "is_causal": is_causal is False and "False",
    }
    for name, got in arguments.items():
        if got:
            raise ValueError(
                f"{name}: got {got} in a step of continuous batching, expected none: requests are told apart by "
                "cu_seq_lens_q and cu_seq_lens_k, their keys are in order, causal, and read without dropout; leave the "
                "block for everything else"
            )
    check_untransformed("generate_batch")
    if getattr(module, BLOCKS, False):
        raise PlanError(
            "use_plan: generate_batch() serves its requests in a thread of its own, which no block of another "
            "thread reaches; use generate() inside the block, or give the model the plan "
            "with adaattn_hf.load_plan(model)"
        )


def _refuse_capture(device: torch.device) -> None:
    if capturing(device):
        raise ValueError(
            "use_cuda_graph: got True for a step of continuous batching whose lengths are read on the host (one with "
            "prompts, of layers that slide, or by a plan of several launches), expected False; pass the settings of "
            "`with adaattn_hf.continuous_batching(model) as engine:`, or ContinuousBatchingConfig(use_cuda_graph=False)"
        )


def _updated(cache: Any, key: Tensor, value: Tensor, module: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    new = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx}
    if "kwargs" in inspect.signature(cache.update).parameters:  # from 5.19 on; it selects the layer's lengths, too
        key, value = cache.update(**new, kwargs=kwargs)
        return key, value
    if (table := kwargs.get("block_table")) is not None:
        if hasattr(cache, "get_cache_for_block_table"):  # 5.18
            group, *cached = cache.get_cache_for_block_table(module.layer_idx)
        else:
            group, layer = cache.layer_index_to_group_indices[module.layer_idx]
            shape = -1, cache.block_size, cache.num_key_value_heads, cache.head_dim
            cached = [tensors[layer].view(shape) for tensors in (cache.key_cache, cache.value_cache)]
        kwargs["block_table"], (kwargs["k_cache"], kwargs["v_cache"]) = table[group], cached
        return key, value
    key, value = cache.update(**new, read_index=kwargs["read_index"], write_index=kwargs["write_index"])
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def _pages(borders: Tensor, window: int | None, kwargs: dict[str, Any]) -> Pages:
    # all layers of a step share it; the engine hands over new sums for each, and a graph has its own
    table, (count, page) = kwargs["block_table"], kwargs["k_cache"].shape[:2]
    pages_by_key = borders.__dict__.setdefault(_PAGES, {})
    key = capturing(borders.device), table.data_ptr(), page, count, window
    if key not in pages_by_key:
        pages_by_key[key] = Pages.of(table, borders, page, count * page, window)
    pages: Pages = pages_by_key[key]
    return pages


def _gathered(structure: Pages, pages: Tensor, new: Tensor) -> Tensor:
    # keys or values of all requests out of the engine's pages, where each request's own are written first
    _refuse_capture(new.device)
    rows, last, places = structure.cached(_read_pages, new.device)
    _row(pages)[last] = new[rows, :, 0]
    return _row(pages)[places].transpose(0, 1)[None]


def _row(pages: Tensor) -> Tensor:
    return pages.view(-1, *pages.shape[2:])


def _read_pages(structure: Pages, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Requests that have keys, where their last ones lie, and where all lie."""
    (places, there), at = structure.places(device), structure.positions(device)[:, 0]
    rows = (at >= 0).nonzero()[:, 0]
    return rows, places[rows, at[rows]], places[there]


def _parts(
    cu_q: Tensor, cu_k: Tensor, positions: Tensor | None, q_len: int, kv_len: int, window: int | None, limit: int | None
) -> tuple[Part, ...]:
    """The parts of a step by running sums `[requests + 1]`, made once for all layers; beyond a limit they are apart."""
    (queries, parts_by_key), (keys, _) = _read(cu_q), _read(cu_k)
    key = id(keys), kv_len, window, limit
    if key not in parts_by_key:
        places = None if positions is None else _read(positions)[0][0]
        alike: dict[tuple[bool, bool, bool], list[tuple[Segment, int]]] = {}
        for run in aligned_runs(queries, keys, q_len, kv_len, True):
            first = run.offset if places is None else places[run.q_start]
            within, beyond = limit is None or first + run.q_len <= limit, limit is not None and first >= limit
            alike.setdefault((run.q_len == 1, within, beyond), []).append((run, first))
        parts: list[Part] = []
        for runs_with_firsts in alike.values():
            group, firsts = zip(*runs_with_firsts, strict=True)
            steps, runs, count = group[0].q_len == 1, [], 0
            for run in group:
                runs.append(run._replace(row=count, q_start=0) if steps else run._replace(q_start=count))
                count += run.q_len
            first, last = group[0].q_start, group[-1].q_start + group[-1].q_len
            rows: slice | Tensor = slice(first, last)
            if count != last - first:
                spread = [torch.arange(run.q_start, run.q_start + run.q_len, device="cpu") for run in group]
                rows = torch.cat(spread).to(cu_q.device)
            batch, length = (count, 1) if steps else (1, count)
            structure = Runs.of(runs, batch, length, kv_len, True, window)
            structure.firsts = firsts
            parts.append((rows, structure))
        parts_by_key[key] = keys, tuple(parts)  # the lengths are kept so that their identity stays theirs
    made: tuple[Part, ...] = parts_by_key[key][1]
    return made


def _read(sums: Tensor) -> tuple[list[Any], dict[Any, Any]]:
    # numbers for which the host waits once, and what was made of them for all layers; tensors made in inference mode do
    # not count writes: these are taken to be made anew for every step
    version = 0 if sums.is_inference() else sums._version
    numbers = sums.__dict__.get(_SUMS)
    if numbers is None or numbers[0] != version:
        numbers = sums.__dict__[_SUMS] = version, sums.tolist(), {}
    return numbers[1], numbers[2]
