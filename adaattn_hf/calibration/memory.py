"""How much memory a calibration takes, told before it is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from adaattn_hf.eval.arms import CHUNK, exact_tap
from adaattn_hf.eval.windows import next_token

from ..attention.listeners import tapping
from .fisher import differentiable
from .inputs import Inputs
from .layers import Layers

PROBE = 256
"""Tokens that the activations of a layer are counted on; lengths that would fit are multiples of it."""
PER_LOGIT = 50
"""Bytes for each logit of a slice while two models are compared, most of them in float64."""
SCORES = 5
"""Copies in float32 of the sampled rows' scores while it is measured what choices drop of them."""


@dataclass(frozen=True)
class Need:
    """Bytes at the peak of a calibration, on one of its longest sequences, of `length` tokens."""

    length: int
    weights: int
    inputs: int  # what every layer is computed again from, and the gradients of its sampled rows
    layer: int  # activations of one layer and their gradients
    rows: int  # attention of the sampled rows, measured before there are gradients
    logits: int  # a slice of the predictions of two models, compared while nothing else is held

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.weights + max(self.inputs + max(self.layer, self.rows), self.logits)

    def sentence(self, room: int | None) -> str:
        """Returns the need in words, and the length that fits into `room` bytes, None where nobody knows how many."""
        needed = f"memory: about {max(self.total / 1e9, 0.1):.1f} GB"
        if room is None or self.total <= room:
            return needed
        fits = int(self.length * (room - self.weights) / (self.total - self.weights)) // PROBE * PROBE
        return f"{needed}; the device has {room / 1e9:.1f} GB: --lengths {max(fits, PROBE)} would fit"


def forecast(inputs: Inputs, layers: Layers) -> Need:
    """Returns what the longest sequences of a calibration need, by what autograd keeps of a short one."""
    arms, settings = inputs.arms, inputs.settings
    length = settings.lengths[-1]
    window = next_token(inputs.windows(inputs.samples[length]["risk"][0])[0].input_ids[:PROBE])
    storages: dict[int, int] = {}  # bytes by storage: what is saved twice, or is a view of weights, counts once

    def hold(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # not by address: wrappers of quantised weights have none
        return tensor.detach()  # a result that is saved by what made it would hold that, and be held by it for good

    for weight in (*arms.model.parameters(), *arms.model.buffers()):
        hold(weight)
    weights = sum(storages.values())
    with differentiable(arms.model), tapping(exact_tap), saved_tensors_hooks(hold, lambda tensor: tensor):
        hidden = arms.hidden(window)
        embedded = arms.model.get_input_embeddings()(arms.tokens(window))  # type: ignore[operator]
    kept, longer = sum(storages.values()) - weights, length / len(window.input_ids)
    call, count = layers.calls[None][length], len(arms.layers)
    sampled = call.query.shape[1] * min(settings.rows, length) * 4  # bytes of an fp32 number for each row of each head
    gradients = settings.labels * sampled * call.value.shape[3]
    return Need(
        length,
        weights,
        inputs=int(longer * embedded.nbytes) * (count + settings.labels) + gradients * len(arms.attentions),
        layer=int(2 * longer * kept / count),
        rows=SCORES * sampled * length,
        logits=PER_LOGIT * min(CHUNK, length) * arms.logits(hidden[:, :1].detach()).shape[-1],
    )


def room_for(model: nn.Module) -> int | None:
    """Returns the bytes that this process may hold on a model's GPUs, None for the machine's own memory."""
    devices = {weight.device for weight in model.parameters()}
    if any(device.type != "cuda" for device in devices):
        return None
    return sum(torch.cuda.mem_get_info(one)[0] + torch.cuda.memory_reserved(one) for one in devices)
