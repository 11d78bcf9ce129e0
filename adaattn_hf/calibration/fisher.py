"""Pass one of calibration: estimates the loss of every choice for every unit from a few backward passes.

For labels drawn from the model, E[KL] = 1/2 E[(g . do)^2], where g is the gradient of the sampled log-likelihood with
respect to the attention output, and do the change of that output by a choice. One backward pass gives g for all heads
of all layers; do is computed on sampled rows by the code that will run the plan. Cross terms between rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention.request import AttentionRequest
from ..attention.tap import Tap, tapping
from ..plans.choices import EXACT, PRECISE_ROWS, Choice
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
        windows: By layer index: the model's own window, `None` without one.
        causal: Whether attention is causal, of any layer.
    """

    grams: dict[int, Gram] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    causal: set[bool] = field(default_factory=set)

    def tap(self, module: nn.Module, request: AttentionRequest) -> Tensor:
        """Adds the moments of one call, on its device, and computes exact attention."""
        index = layer_of(module, request)
        new = gram(request.query.detach(), request.key.detach())
        self.grams[index] = self.grams[index] + new if index in self.grams else new
        self.windows[index] = request.structure.window
        self.causal.add(request.structure.causal)
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


def in_pieces(
    request: AttentionRequest, rows: Tensor, choices: Sequence[Choice], tensors: LayerTensors
) -> tuple[Tensor, Tensor]:
    """Returns `row_outputs`, of half of the rows at a time where the device has no room for all."""
    try:
        return row_outputs(request, rows, choices, tensors)
    except torch.OutOfMemoryError:
        if len(rows) < 2 * PRECISE_ROWS:
            raise
    outputs, losses = zip(*(in_pieces(request, half, choices, tensors) for half in rows.chunk(2)), strict=True)
    return torch.cat(outputs, dim=2), torch.cat(losses, dim=2)


@dataclass(eq=False)
class FisherRecorder:
    """Records the gradients and changes of one layer at a time, as backward passes compute the layers again.

    Attributes:
        rows: Sampled query rows.
        choices: See `measure`, as for `tensors` and `report`.
        labels: Backward passes to come; the last one brings the changes.
        gradients: By layer index: `[heads, rows, head_dim_v]` of each backward pass so far.
        found: The outputs of the layer that was computed again last.
        forward: Whether the forward pass is still under way.
    """

    rows: Tensor
    choices: Sequence[Choice]
    tensors: Mapping[int, LayerTensors]
    labels: int
    report: Callable[[int, Tensor, Tensor], None]
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)
    found: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    forward: bool = True

    def tap(self, module: nn.Module, request: AttentionRequest) -> Tensor:
        """Computes exact attention; listens to its gradient, or measures what each choice would change."""
        index = layer_of(module, request)
        if not self.forward:
            # before exact attention: a layer is not computed again beyond the last tensor that autograd saved of it
            if self.labels == 1:
                query, key, value = (one.detach() for one in (request.query, request.key, request.value))
                bare = replace(request, query=query, key=key, value=value)
                every, tensors = [EXACT, *self.choices], self.tensors.get(index, LayerTensors())
                self.found[index] = in_pieces(bare, self.rows, every, tensors)
            return exact_tap(module, request)
        if index in self.gradients:
            raise ValueError(f"layer {index} attends twice in one forward pass; plans serve one attention per layer")
        self.gradients[index] = []
        out = exact_tap(module, request)

        def note(gradient: Tensor) -> None:
            rows = self.rows.to(gradient.device)
            self.gradients[index].append(gradient[0, rows].transpose(0, 1).detach())
            if self.labels == 1:  # all there is to know of the layer: it is reported, and let go
                (outputs, dropped), gradients = self.found.pop(index), self.gradients.pop(index)
                changes = outputs[1:] - outputs[:1]
                products = torch.stack([(changes * one.float()).sum(-1) for one in gradients])
                self.report(index, products, dropped[1:])

        out.register_hook(note)  # type: ignore[no-untyped-call]
        return out


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Lets gradients flow to the activations of a model from its embedding on, and to no weight."""
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    handle = embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    try:
        with torch.enable_grad():
            yield
    finally:
        handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def recomputed(layers: Sequence[nn.Module], tap: Tap) -> Iterator[None]:
    """Lets the backward pass of what is computed here compute layers again: autograd holds one layer's activations.

    Whatever thread computes a layer, its attention is answered by the tap: a tap that is open here alone is not known
    to the threads in which CUDA's backward passes run.
    """

    def twice(forward: Callable[..., Any]) -> Callable[..., Any]:
        def once(*args: Any, **kwargs: Any) -> Any:
            with tapping(tap):
                return forward(*args, **kwargs)

        return partial(checkpoint, once, use_reentrant=False, preserve_rng_state=False)

    own = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = twice(layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:  # a hook of accelerate's, say
                layer.forward = forward  # type: ignore[method-assign]


def drawn_labels(likelihood: Tensor, labels: int, generator: torch.Generator) -> Tensor:
    """Returns labels `[n, labels]` drawn from log-likelihoods `[n, vocabulary]`, on their device.

    Random numbers come from the CPU's generator, so that they are the same for every device.

    Raises:
        ValueError: If a likelihood is no number.
    """
    below = likelihood.double().exp().cumsum(-1)
    refuse_infinite(below[:, -1].isfinite().cpu().numpy(), "exact attention")
    place = torch.rand(len(below), labels, generator=generator, dtype=torch.float64, device="cpu").to(below.device)
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
    tensors: Mapping[int, LayerTensors],
    *,
    rows: int,
    labels: int,
    generator: torch.Generator,
    report: Callable[[int, Tensor, Tensor], None],
) -> int:
    """Runs one sequence forward and `labels` times backward; returns how many rows each layer reports, over all labels.

    Labels are drawn for every scored prediction: at each position, or at the masked positions of a reading.

    Args:
        arms: The model.
        given: Token ids, or a reading.
        choices: Choices to measure.
        tensors: By layer index.
        rows: Query rows to sample.
        labels: Labels to draw.
        generator: Draws rows and labels.
        report: Called once a layer, the last one first, with its index, the products g . do `[labels, choices, heads,
            rows]` and the dropped mass `[choices, heads, rows]`.

    Raises:
        ValueError: If the loss does not depend on a layer.
    """
    sampled = stratified_rows(reading_of(given).tokens.shape[1], rows, generator)
    recorder = FisherRecorder(sampled, choices, tensors, labels, report)
    with differentiable(arms.model):
        with recomputed(arms.layers, recorder.tap):
            hidden = arms.hidden(given)
        recorder.forward = False
        for gradient in label_gradients(arms, hidden, generator, labels):
            torch.autograd.backward(hidden, gradient, retain_graph=recorder.labels > 1)
            recorder.labels -= 1
    if recorder.gradients:
        raise ValueError(
            f"model: no prediction depends on the attention of layers {sorted(recorder.gradients)}, expected that of "
            "every layer to count: risks of these would be 0; leave them out of the model"
        )
    return labels * len(sampled)


def unit_risks(products: Tensor, kv_heads: int, combine: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns for each key/value head of a layer `[kv_heads, choices]` the sums of 1/2 (g . do)^2 over labels and rows.

    Products are linear in do: they add up over the query heads of a key/value head, and over the parts of a combined
    choice (a window in int8, say), which the zeros and ones of `combine` `[choices, base choices]` name.
    """
    labels, base, heads, rows = products.shape
    grouped = products.double().view(labels, base, kv_heads, heads // kv_heads, rows).sum(3)
    mixed = torch.einsum("cb,lbur->lcur", torch.from_numpy(combine).to(grouped), grouped)
    return np.asarray((0.5 * mixed.square().sum((0, 3))).T.cpu().numpy())
