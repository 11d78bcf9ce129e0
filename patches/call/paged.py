"""Attention for continuous batching: many requests packed into one row, with keys in the engine's paged cache.

The engine of Transformers 5.17 and 5.18 calls `paged|NAME` for a model that is set to `NAME`. Later engines accept only
a fixed list of names; there nothing is registered and this module is not imported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends import select

from .keywords import HARMLESS
from .refusals import check_untransformed, refuse_unknown

_OF_THE_ENGINE = HARMLESS | {
    "block_table", "is_causal", "logits_indices", "logits_processor_args", "max_seqlen_k", "max_seqlen_q",
    "position_ids", "read_index", "write_index",
}  # fmt: skip
"""What the engine hands to every layer, and what models that it serves say of themselves."""


def paged_function(backend: str | None = None) -> Any:
    """The function to register as `paged|NAME`.

    Args:
        backend: Name of the backend to use for every call, or None to choose one per kind of call.
    """

    def adaattn_paged(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cache: Any = None,
        cu_seq_lens_q: Any = None,
        cu_seq_lens_k: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Returns the output `[1, q_len, heads, head_dim_v]` of all requests; tokens of no request are zero.

        Raises:
            ValueError: The call is not a step of continuous batching, passes a block table or a mask, or asks for what
                the requests of a batch are not served with.
            BackendRefusal: A function transform is at work.
            PlanError: Some thread runs the model with another plan (`use_plan`).
        """
        from adaattn_hf.attention.tap import SEATED
        from adaattn_hf.plans import execute
        from adaattn_hf.plans.record import PlanError

        from ..plans.attach import program_of

        if cache is None or kwargs.get("block_table") is not None:
            raise ValueError(
                "attn_implementation: 'paged|adaattn' serves steps of continuous batching without a block table; use "
                "'adaattn' for everything else"
            )
        refuse_unknown(module, kwargs, _OF_THE_ENGINE)
        if attention_mask is not None or dropout:
            name, got = ("dropout", dropout) if attention_mask is None else ("attention_mask", "a mask")
            raise ValueError(
                f"{name}: got {got} in a step of continuous batching, expected none: requests are told apart by "
                "cu_seq_lens_q and cu_seq_lens_k, and generated without dropout; use 'adaattn' for everything else"
            )
        check_untransformed("generate_batch")
        if getattr(module, SEATED, False):
            raise PlanError(
                "use_plan: generate_batch() serves its requests in a thread of its own, which no block of another "
                "thread reaches; use generate() inside the block, or give the model the plan "
                "with adaattn_hf.load_plan(model)"
            )
        window = sliding_window or getattr(module, "sliding_window", None) or None
        if isinstance(cu_seq_lens_k, dict):
            cu_seq_lens_k = cu_seq_lens_k["full_attention" if window is None else "sliding_attention"]
        key, value = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        out = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))
        program = program_of(module, False)
        q_borders, k_borders = cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist()
        for q, q_stop, k, k_stop in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False):
            if q_stop <= q or k_stop <= k:
                continue
            # a request's queries are the last of its tokens
            past = (k_stop - k) - (q_stop - q)
            request = AttentionRequest(
                query[:, :, q:q_stop],
                key[:, :, k:k_stop],
                value[:, :, k:k_stop],
                CallStructure(1, q_stop - q, k_stop - k, causal=True, q_offset=past, window=window),
                query.shape[3] ** -0.5 if scaling is None else scaling,
                softcap=softcap,
                sink_logits=s_aux,
            )
            if program is not None:
                out[:, q:q_stop] = execute.attend(program, request, backend).out
            else:
                out[:, q:q_stop] = select.attend(request, backend).out
        return out, None

    return adaattn_paged
