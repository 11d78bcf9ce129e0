"""The native kernels as a backend: what they serve, and which of their entrances a call takes."""

from __future__ import annotations

import torch
from torch import Tensor

from adaattn_hf.backends.base import Backend, BareCall
from adaattn_hf.request import AttentionRequest, AttentionResult, CallSpec
from adaattn_hf.structure import CallStructure

__all__ = ["NativeBackend"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NativeBackend(Backend):
    """Serves every structure on CPUs where the library has been built, forward and backward."""

    name = "native"

    def missing(self) -> tuple[str, ...]:
        """The library, where it was not built or cannot be loaded."""
        from .library import missing

        return missing()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """Other devices and dtypes, and dropout."""
        reasons = []
        if spec.device != "cpu":
            reasons.append(f"the native kernels run on CPUs, the tensors are on {spec.device}")
        if spec.dtype not in _DTYPES:
            reasons.append(
                f"the native kernels have no {spec.dtype}; they have float32, bfloat16 and float16"
            )
        if spec.dropout:
            reasons.append("the native kernels have no dropout")
        return tuple(reasons)

    def attend(self, request: AttentionRequest) -> AttentionResult:
        """Attention in one call of the library, whatever the structure.

        Without a gradient the library is called directly: the dispatcher of an operator would cost more than a small
        call.
        """
        if torch.compiler.is_compiling():
            from .autograd import traced

            return AttentionResult(*traced(request))
        from . import call
        from .rules import rules_of, with_extras

        q, k, v = request.query, request.key, request.value
        rules = rules_of(request.structure)
        if request.bias is not None or request.sink_logits is not None or request.softcap is not None:
            rules = with_extras(rules, request.bias, request.sink_logits, request.softcap or 0.0, k.shape[2])
        if torch.is_grad_enabled() and _needs_grad(request):
            from .autograd import Differentiable

            return AttentionResult(
                *Differentiable.apply(  # type: ignore[no-untyped-call]
                    q, k, v, request.bias, request.sink_logits, request.scaling, rules
                )
            )
        out, lse = call.forward(q, k, v, request.scaling, rules, need_lse=request.need_lse)
        assert out is not None
        return AttentionResult(out, lse)

    def bare(self, spec: CallSpec, structure: CallStructure) -> BareCall | None:
        """One call of the library, with the rules of the structure at hand."""
        if spec.needs_grad:
            return None
        from .call import forward
        from .rules import rules_of

        rules = rules_of(structure)

        def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            out, _ = forward(query, key, value, scaling, rules)
            assert out is not None  # the output is asked for
            return out

        return attend


def _needs_grad(request: AttentionRequest) -> bool:
    tensors = (request.query, request.key, request.value, request.bias, request.sink_logits)
    return any(t is not None and t.requires_grad for t in tensors)
