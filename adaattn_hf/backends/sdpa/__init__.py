"""Attention through torch's own fused kernels, called as the structure of a call suggests."""

from __future__ import annotations

from ...request import CallSpec
from ...structure import CallStructure
from ..base import Backend, BareCall
from .router import attend
from .traced import bare_call

__all__ = ["SdpaBackend"]


class SdpaBackend(Backend):
    """Serves every structure on every device, forward and backward."""

    name = "sdpa"

    def missing(self) -> tuple[str, ...]:
        """Needs torch alone."""
        return ()

    def refusals(self, spec: CallSpec) -> tuple[str, ...]:
        """What it cannot compute."""
        reasons = []
        if spec.need_lse and (spec.compiling or spec.dropout):
            reasons.append("the log-sum-exp is not returned from traced graphs or under dropout")
        return tuple(reasons)

    attend = staticmethod(attend)

    def bare(self, spec: CallSpec, structure: CallStructure) -> BareCall | None:
        """The operator itself, where it says what the structure says."""
        if spec.head_dim != spec.head_dim_v:
            return None
        if spec.decode:
            if spec.device != "cuda" or spec.kind not in ("full", "causal", "suffix"):
                return None  # on processors one query has ways of its own
            # the operator's own kernels split the keys among programs and read grouped heads once
            stop = structure.offset() + 1 if structure.causal else structure.kv_len
            if stop < 1:
                return None
            return bare_call(False, spec.groups > 1, stop if stop < structure.kv_len else None)
        if spec.kind not in ("full", "causal"):
            return None
        return bare_call(spec.kind == "causal", spec.groups > 1)
