"""How much memory a calibration takes, told before it is taken, and what is said where there is none left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..attention.tap import tapping
from ..errors import OutOfMemory
from .arms import CHUNK, ModelArms, exact_tap
from .fisher import differentiable
from .inputs import Inputs
from .layers import Layers

PROBE = 256
"""Tokens that the activations of a layer are counted on."""
PER_LOGIT = 50
"""Bytes for each logit of a slice while two models are compared, most of them in float64."""
SCORES = 5
"""Copies in float32 of the sampled rows' scores while it is measured what choices drop of them."""


@dataclass(frozen=True)
class Need:
    """Bytes at the peak of a calibration, on one of its longest sequences.

    Attributes:
        length: Tokens of the sequence.
        weights: The model.
        inputs: What every layer is computed again from.
        layer: Activations of one layer and their gradients.
        rows: Attention of the sampled rows, measured before there are gradients.
        logits: A slice of the predictions of two models, compared while nothing else is held.
    """

    length: int
    weights: int
    inputs: int
    layer: int
    rows: int
    logits: int

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.weights + max(self.inputs + max(self.layer, self.rows), self.logits)

    def at(self, length: int) -> Need:
        """Returns the bytes at another length."""
        scaled = {name: getattr(self, name) * length // self.length for name in ("inputs", "layer", "rows")}
        return replace(self, length=length, **scaled)

    def sentence(self, room: int | None) -> str:
        """Returns the need in words.

        Args:
            room: Bytes that the device has for all of it, None if nobody knows.
        """
        parts = {
            "weights": self.weights,
            "inputs of the layers": self.inputs,
            "one layer": self.layer,
            "attention of the sampled rows": self.rows,
            f"{CHUNK} positions of logits": self.logits,
        }
        words = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
        said = f"memory: about {gigabytes(self.total)} GB for a sequence of {self.length} tokens ({words})"
        if room is None or self.total <= room:
            return said
        shorter = self.length // 2
        while shorter > PROBE and self.at(shorter).total > room:
            shorter //= 2
        return f"{said}; the device has {gigabytes(room)} GB: --lengths {shorter} would fit"


def gigabytes(size: int) -> str:
    """Returns bytes in units of 10^9."""
    return f"{size / 1e9:.2g}" if size < 1e9 else f"{size / 1e9:.1f}"


def forecast(inputs: Inputs, layers: Layers) -> Need:
    """Returns what the longest sequences of a calibration need, by the activations of a short one."""
    arms, settings = inputs.arms, inputs.settings
    length = settings.lengths[-1]
    reading = inputs.readings(inputs.samples[length].risk[0])[0]
    held, saved = activations(arms, reading.tokens[:, :PROBE])
    tokens = min(PROBE, reading.tokens.shape[1])
    query = layers.calls[length].query
    with torch.no_grad():
        vocabulary = arms.logits(arms.exact(reading.tokens[:, :1])).shape[-1]
    return Need(
        length,
        weights=sum(_bytes_of(arms.model).values()),
        inputs=held * length // tokens * (len(arms.layers) + settings.labels),
        layer=2 * saved * length // tokens // len(arms.layers),
        rows=SCORES * query.shape[1] * min(settings.rows, length) * length * 4,
        logits=PER_LOGIT * min(CHUNK, length) * vocabulary,
    )


def activations(arms: ModelArms, tokens: Tensor) -> tuple[int, int]:
    """Returns the bytes of the input of a layer, and of all that autograd keeps of a forward pass beside weights."""
    given: list[int] = []
    saved: list[Tensor] = []

    def enter(_module: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        every = [
            one for one in (*arguments, *named.values()) if isinstance(one, Tensor) and one.requires_grad
        ]
        given.append(sum(one.nbytes for one in every))

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in arms.layers]
    try:
        with differentiable(arms.model), tapping(exact_tap), saved_tensors_hooks(pack, lambda tensor: tensor):
            arms.hidden(tokens)
    finally:
        for handle in handles:
            handle.remove()
    weights = _bytes_of(arms.model)
    return max(given), sum(
        size for address, size in _bytes_by_address(saved).items() if address not in weights
    )


def _bytes_of(model: nn.Module) -> dict[int, int]:
    """Bytes of a model's weights and buffers, by their addresses."""
    return _bytes_by_address([*model.parameters(), *model.buffers()])


def _bytes_by_address(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the storages of tensors, by their addresses."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def room_on(device: torch.device) -> int | None:
    """Returns the bytes that this process may hold on a device, None for the machine's own memory."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)


CPU_ALLOCATOR = "DefaultCPUAllocator"
FULL = (CPU_ALLOCATOR, "out of memory", "STATUS_ALLOC_FAILED")
"""Words in the plain `RuntimeError` that torch raises where the machine, or a library of CUDA's, has no memory left."""


@contextmanager
def room_or_sentence(sentence: Callable[[str], str]) -> Iterator[None]:
    """Runs device work; where memory does not suffice, the sentence is raised in place of the allocator's error.

    Args:
        sentence: What to say, given what the allocator said.

    Raises:
        OutOfMemory: The device or the machine has no room.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(sentence(_said(error))) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in FULL):
            raise
        raise OutOfMemory(sentence(_said(error))) from error


def _said(error: Exception) -> str:
    """What an allocator wanted, without its advice on fragmentation and the addresses in its source."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text[text.find(CPU_ALLOCATOR) :] if CPU_ALLOCATOR in text else text
    for advice in (
        " Including non-PyTorch memory",
        " Of the allocated memory",
        " If reserved",
        " Error code",
    ):
        text = text.partition(advice)[0]
    return text.rstrip(". ")
