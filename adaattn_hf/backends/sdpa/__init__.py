"""Attention through torch's own fused kernels, called as the structure of a call suggests."""

from ...attention.kind import BIAS, COMPILING, DROPOUT, GRAD, OPAQUE, SINKS, SOFTCAP, CallKind
from ..base import Backend, Kernel, PerHead, Supports


class SdpaBackend(Backend):
    """Serves every structure on every device, forward and backward."""

    name = "sdpa"
    supports = Supports("torch's kernels", DROPOUT | SOFTCAP | SINKS | BIAS | GRAD | COMPILING | OPAQUE)

    def refusals(self, kind: CallKind) -> tuple[str, ...]:
        """What it cannot compute."""
        reasons = super().refusals(kind)
        if kind.device.type == "meta" and kind.shape == "ragged" and not kind.compiling:
            reasons += ("meta tensors have no padding to read, by which calls of torch's kernels are made",)
        return reasons

    def kernel(self, kind: CallKind, rules: PerHead) -> Kernel:
        """As few calls of the operator as the structure allows."""
        from .dispatch import kernel_of

        return kernel_of(kind)
