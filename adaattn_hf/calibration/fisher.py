"""Pass one of calibration: estimates the loss of every choice for every unit from a few backward passes.

For labels drawn from the model, E[KL] = 1/2 E[(g . do)^2], where g is the gradient of the sampled log-likelihood with
respect to the attention output, and do the change of that output by a choice. One backward pass gives g for all heads
of all layers; do is computed on sampled rows by the code that will run the plan. Cross terms between rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..attention.request import AttentionRequest
from ..attention.tap import tapping
from ..plans.choices import EXACT, Choice
from ..plans.sampled import row_outputs
from ..plans.tensors import LayerTensors
from ..stats.rows import stratified_rows
from ..stats.spectrum import Gram, gram
from .arms import CHUNK, ModelArms, exact_tap, refuse_infinite
from .scoring import Input, reading_of


@dataclass
class Moments:
    """Pass zero: mean keys and Gram matrices of each layer.

    Attributes:
        grams: By layer index.
        shapes: By layer index: heads, key/value heads, head_dim, head_dim_v.
        windows: By layer index: the model's own window, `None` without one.
        causal: Whether attention is causal.
    """

    grams: dict[int, Gram] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    causal: dict[int, bool] = field(default_factory=dict)

    def tap(self, module: nn.Module, request: AttentionRequest) -> Tensor:
        """Adds the moments of one call, and computes exact attention."""
        index = layer_of(module, request)
        new = gram(request.query.detach(), request.key.detach())
        new = Gram(new.query.cpu(), new.key.cpu(), new.key_sum.cpu(), new.count)
        self.grams[index] = self.grams[index] + new if index in self.grams else new
        query, key, value = request.query, request.key, request.value
        self.shapes[index] = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        self.windows[index] = request.structure.window
        self.causal[index] = request.structure.causal
        return exact_tap(module, request)


def layer_of(module: nn.Module, request: AttentionRequest) -> int:
    """Returns the number of the layer that makes a request.

    Raises:
        ValueError: If it has none.
    """
    if request.layer is None:
        raise ValueError(
            f"{type(module).__name__} has no layer_idx: a plan could not name its layer; plans serve models whose "
            "attention modules are numbered (LLaMA, GPT-2, BERT and their kin)"
        )
    return request.layer


@dataclass(eq=False)
class FisherRecorder:
    """Records one forward pass, then its backward passes.

    Attributes:
        rows: Sampled query rows.
        choices: Choices measured, without the exact one, which they are compared with.
        tensors: By layer index.
        changes: By layer index: `[choices, heads, rows, head_dim_v]`, change of the output by each choice.
        dropped: By layer index: `[choices, heads, rows]`.
        gradients: By layer index: `[heads, rows, head_dim_v]` of the current backward pass.
        listening: Whether calls are recorded; a checkpointed backward pass repeats the forward calls.
    """

    rows: Tensor
    choices: Sequence[Choice]
    tensors: dict[int, LayerTensors]
    changes: dict[int, Tensor] = field(default_factory=dict)
    dropped: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    listening: bool = True

    def tap(self, module: nn.Module, request: AttentionRequest) -> Tensor:
        """Computes exact attention, and records what each choice would change."""
        out = exact_tap(module, request)
        if not self.listening:
            return out
        index = layer_of(module, request)
        if index in self.changes:
            raise ValueError(
                f"layer {index} attends twice in one forward pass; plans serve one attention per layer"
            )
        bare = replace(
            request, query=request.query.detach(), key=request.key.detach(), value=request.value.detach()
        )
        tensors = self.tensors.get(index, LayerTensors())
        outputs, dropped = row_outputs(bare, self.rows, [EXACT, *self.choices], tensors)
        self.changes[index] = outputs[1:] - outputs[:1]
        self.dropped[index] = dropped[1:]

        def note(gradient: Tensor) -> None:
            self.gradients[index] = gradient[0, self.rows].transpose(0, 1).detach().float()

        out.register_hook(note)  # type: ignore[no-untyped-call]
        return out

    def products(self) -> dict[int, Tensor]:
        """Returns by layer index `[choices, heads, rows]`: g . do of each head, for the last backward pass."""
        return {
            index: (change * self.gradients[index][None]).sum(-1) for index, change in self.changes.items()
        }


def drawn_labels(likelihood: Tensor, labels: int, generator: torch.Generator) -> Tensor:
    """Returns labels `[n, labels]` drawn from log-likelihoods `[n, vocabulary]`, on their device.

    Random numbers come from the CPU's generator, so that they are the same for every device.

    Raises:
        ValueError: If a likelihood is no number.
    """
    below = likelihood.double().exp().cumsum(-1)
    refuse_infinite(below[:, -1].isfinite().cpu().numpy(), "exact attention")
    place = torch.rand(len(below), labels, generator=generator, dtype=torch.float64, device="cpu").to(
        below.device
    )
    return torch.searchsorted(below, place * below[:, -1:])


def label_gradients(arms: ModelArms, hidden: Tensor, generator: torch.Generator, labels: int) -> list[Tensor]:
    """Returns, for each of `labels` draws y ~ model, the gradient of sum log p(y) with respect to the hidden states."""
    state = hidden.detach()
    gradients = [torch.empty_like(state) for _ in range(labels)]
    for start in range(0, state.shape[1], CHUNK):
        piece = state[:, start : start + CHUNK].requires_grad_()
        logits = arms.logits(piece)
        likelihood = logits.log_softmax(-1)
        drawn = drawn_labels(likelihood[0].detach(), labels, generator)
        for index in range(labels):
            chosen = likelihood[0].gather(1, drawn[:, index : index + 1]).sum()
            (gradient,) = torch.autograd.grad(chosen, piece, retain_graph=index + 1 < labels)
            gradients[index][:, start : start + CHUNK] = gradient
    return gradients


def measure(
    arms: ModelArms,
    given: Input,
    choices: Sequence[Choice],
    tensors: dict[int, LayerTensors],
    *,
    rows: int,
    labels: int,
    generator: torch.Generator,
    on_products: Callable[[dict[int, Tensor]], None],
) -> FisherRecorder:
    """Runs one sequence forward and `labels` times backward; calls `on_products` with g . do after each backward pass.

    Labels are drawn for every scored prediction: at each position, or at the masked positions of a reading.
    """
    sampled = stratified_rows(reading_of(given).tokens.shape[1], rows, generator)
    recorder = FisherRecorder(sampled, choices, tensors)
    frozen = [parameter for parameter in arms.model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    embedding = arms.model.get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    try:
        with torch.enable_grad(), tapping(recorder.tap):
            hidden = arms.hidden(given)
            recorder.listening = False
            for index, gradient in enumerate(label_gradients(arms, hidden, generator, labels)):
                torch.autograd.backward(hidden, gradient, retain_graph=index + 1 < labels)
                on_products(recorder.products())
    finally:
        handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(True)
    return recorder


def unit_risks(
    products: dict[int, Tensor], kv_heads: int, combine: NDArray[np.float64]
) -> tuple[NDArray[np.float64], int]:
    """Returns `[units, choices]` sums of 1/2 (g . do)^2 over rows, and the number of rows.

    Products are linear in do: they add up over the query heads of a key/value head, and over the parts of a combined
    choice (a window in int8, say). Each unit is one key/value head of one layer, in ascending order of layers.

    Args:
        products: By layer index `[base choices, heads, rows]`.
        kv_heads: Key/value heads per layer.
        combine: `[choices, base choices]` of zeros and ones.
    """
    sums = []
    rows = 0
    for index in sorted(products):
        base, heads, rows = products[index].shape
        grouped = products[index].double().view(base, kv_heads, heads // kv_heads, rows).sum(2)
        mixed = torch.einsum("cb,bur->cur", torch.from_numpy(combine).to(grouped), grouped)
        sums.append((0.5 * mixed.square().sum(-1)).T.cpu().numpy())
    return np.concatenate(sums, axis=0), rows
