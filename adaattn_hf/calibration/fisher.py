"""Pass one of calibration: estimates the loss of every choice for every unit from a few backward passes.

For labels drawn from the model, E[KL] = 1/2 E[(g . do)^2], where g is the gradient of the sampled log-likelihood with
respect to the attention output, and do the change of that output by a choice. A way back for each label gives g for all
heads of all layers, and computes each layer again; do is computed on sampled rows by the code that will run the plan.
Cross terms between rows are left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from adaattn_hf.eval.arms import CHUNK, ModelArms, exact_tap, layer_of, refuse_infinite
from adaattn_hf.eval.windows import TokenWindow

from ..attention.call import AttentionCall
from ..attention.listeners import tapping
from ..plans.choices import EXACT, MIN_PREFILL_ROWS, Choice
from ..plans.sampled import row_outputs
from ..plans.tensors import LayerTensors


def in_pieces(
    call: AttentionCall, rows: Tensor, choices: Sequence[Choice], tensors: LayerTensors
) -> tuple[Tensor, Tensor]:
    """Returns `row_outputs`, computed for half of the rows at a time where the device has no room for all."""
    try:
        return row_outputs(call, rows, choices, tensors)
    except torch.OutOfMemoryError:
        if len(rows) < 2 * MIN_PREFILL_ROWS:
            raise
    outputs, losses = zip(*(in_pieces(call, half, choices, tensors) for half in rows.chunk(2)), strict=True)
    return torch.cat(outputs, dim=2), torch.cat(losses, dim=2)


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
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Layers that are called meanwhile keep their inputs alone; each way back computes them again, one at a time.

    To their ends, where hooks of accelerate's let go of the weights that they brought.
    """
    forwards = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(  # type: ignore[method-assign]
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        with set_checkpoint_early_stop(False):
            yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            if forward is None:
                del layer.forward
            else:  # a hook of accelerate's, say
                layer.forward = forward  # type: ignore[method-assign]


def drawn_labels(likelihood: Tensor, labels: int, generator: torch.Generator) -> Tensor:
    """Returns labels `[n, labels]` drawn from finite log-likelihoods `[n, vocabulary]`, on their device.

    Random numbers come from the CPU's generator, so that they are the same for every device.
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
    window: TokenWindow,
    choices: Sequence[Choice],
    tensors: Mapping[int, LayerTensors],
    *,
    rows: Tensor,
    labels: int,
    generator: torch.Generator,
    report: Callable[[int, Tensor, Tensor], None],
) -> None:
    """Runs one sequence forward and `labels` times backward; refuses a model whose loss does not depend on a layer.

    Labels are drawn for every scored prediction: at each row, or at the positions of the window. `report` is called
    once for each layer, the last one first, with its index, the products g . do `[labels, choices, heads, rows]` and
    the dropped mass `[choices, heads, rows]`.
    """
    # of layers not reported yet: gradients at the rows, by label so far, and what each choice changes and drops
    gradients, changes = dict[int, list[Tensor]](), dict[int, tuple[Tensor, Tensor]]()
    label = 0  # which way back is under way, from 1 on; 0 on the way forward

    def complete(index: int) -> None:
        # as soon as all is known of a layer: one that ends with its attention hears gradients before it runs again
        if len(gradients[index]) == labels and index in changes:
            changed, dropped = changes.pop(index)
            products = [(changed * one).sum(-1) for one in gradients.pop(index)]
            report(index, torch.stack(products), dropped)

    def note(index: int, gradient: Tensor) -> None:
        gradients[index].append(gradient[0, rows.to(gradient.device)].transpose(0, 1).float())
        complete(index)

    def tap(module: nn.Module, call: AttentionCall) -> Tensor:
        # exact attention, whose gradients are heard; on the last way back what choices change is measured
        index = layer_of(module, call)
        if label == labels:
            query, key, value = (one.detach() for one in (call.query, call.key, call.value))
            bare, of_layer = replace(call, query=query, key=key, value=value), tensors.get(index, LayerTensors())
            outputs, dropped = in_pieces(bare, rows, [EXACT, *choices], of_layer)
            changes[index] = outputs[1:] - outputs[:1], dropped[1:]
            complete(index)
        out = exact_tap(module, call)
        if not label:
            if index in gradients:
                raise ValueError(
                    f"layer {index} attends twice in one forward pass; plans serve one attention per layer"
                )
            gradients[index] = []
            if out.requires_grad:
                out.register_hook(partial(note, index))  # type: ignore[no-untyped-call]
        return out

    with differentiable(arms.model), tapping(tap):
        with recomputed(arms.layers):
            hidden = arms.hidden(window)
        ways_back = label_gradients(arms, hidden, generator, labels)
        # a GPU's way back runs in a thread of its own, which would not hear the layers that are computed again
        with torch.autograd.set_multithreading_enabled(False):
            for label, gradient in enumerate(ways_back, 1):
                torch.autograd.backward(hidden, gradient, retain_graph=label < labels)
    if gradients:
        raise ValueError(
            f"model: no prediction depends on the attention of layers {sorted(gradients)}, expected that of "
            "every layer to count: risks of these would be 0; leave them out of the model"
        )


def unit_risks(products: Tensor, kv_heads: int, combine: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns for each key/value head of a layer `[kv_heads, choices]` the sums of 1/2 (g . do)^2 over labels and rows.

    Products are linear in do: they add up over the query heads of a key/value head, and over the parts of a combined
    choice (a window in int8, say), which the zeros and ones of `combine` `[choices, base choices]` name.
    """
    labels, base, heads, rows = products.shape
    grouped = products.double().view(labels, base, kv_heads, heads // kv_heads, rows).sum(3)
    mixed = torch.einsum("cb,lbur->lcur", torch.from_numpy(combine).to(grouped), grouped)
    return np.asarray((0.5 * mixed.square().sum((0, 3))).T.cpu().numpy())
