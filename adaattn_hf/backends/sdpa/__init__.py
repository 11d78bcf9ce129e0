"""Attention through torch's own fused kernels, called as the structure of a call suggests."""

from __future__ import annotations

from ...request import CallSpec
from ..base import Backend
from .bare import bare_way
from .router import attend

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

    bare = staticmethod(bare_way)
