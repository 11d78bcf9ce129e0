"""The gradient of learned sinks, which every backward pass can take from the output and the log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """`-sum_i p_sink,i D_i` with `D = rowsum(dO * O)`: a sink draws weight and carries no value.

    Args:
        grad: Gradient of the output, `[batch, q_len, heads, head_dim_v]`.
        out: The output.
        lse: Log-sum-exp of each row with the sink in it, `[batch, heads, q_len]`, nats; its dtype is computed in.
        sink_logits: `[heads]`.

    Returns:
        Like `sink_logits`.
    """
    wide = lse.dtype
    delta = (grad.to(wide) * out.to(wide)).sum(dim=3).transpose(1, 2)
    share = torch.exp(sink_logits.to(wide).reshape(1, -1, 1) - lse)
    return -(share * delta).sum(dim=(0, 2)).reshape(sink_logits.shape).to(sink_logits.dtype)
