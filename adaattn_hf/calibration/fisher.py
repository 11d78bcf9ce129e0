"""Pass one of calibration: estimates the loss of every choice for every unit from a few backward passes.

For labels drawn from the model, E[KL] = 1/2 E[(g . do)^2], where g is the gradient of the sampled log-likelihood with
respect to the attention output, and do the change of that output by a choice. One way back gives g for all heads of
all layers and all labels, and computes each layer again once; do is computed on sampled rows by the code that will run
the plan. Cross terms between rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

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


@dataclass(eq=False)
class _Recorder:
    """Records the gradients and changes of one layer at a time, as layers are computed again on the way back."""

    rows: Tensor  # as the next four, those of `measure`
    choices: Sequence[Choice]
    tensors: Mapping[int, LayerTensors]
    labels: int
    report: Callable[[int, Tensor, Tensor], None]
    left: set[int] = field(default_factory=set)  # layers that are not reported yet
    forward: bool = True  # whether the forward pass is still under way

    def tap(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """Computes exact attention; on the way back, measures what each choice would change and hears its gradients."""
        index = layer_of(module, call)
        if self.forward:
            if index in self.left:
                raise ValueError(
                    f"layer {index} attends twice in one forward pass; plans serve one attention per layer"
                )
            self.left.add(index)
            return exact_tap(module, call)
        query, key, value = (one.detach() for one in (call.query, call.key, call.value))
        bare = replace(call, query=query, key=key, value=value)
        outputs, dropped = in_pieces(bare, self.rows, [EXACT, *self.choices], self.tensors.get(index, LayerTensors()))
        changes, products = outputs[1:] - outputs[:1], []
        out = exact_tap(module, call)

        def note(gradient: Tensor) -> None:
            rows = self.rows.to(gradient.device)
            products.append((changes * gradient[0, rows].transpose(0, 1).float()).sum(-1))
            if len(products) == self.labels:  # all there is to know of the layer: it is reported, and let go
                self.left.discard(index)
                self.report(index, torch.stack(products), dropped[1:])

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


def _learns(one: Any) -> bool:
    return isinstance(one, Tensor) and one.requires_grad


@dataclass(eq=False)
class _LayerCall:
    """A layer's call, whose graph is not kept: it is computed again when all gradients of its outputs are known."""

    forward: Callable[..., Any]
    given: list[Any]  # its arguments, flattened as the next field says
    spec: TreeSpec
    gradients: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # those so far, by label and output

    def outputs(self, inputs: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
        args, kwargs = tree_unflatten(inputs, self.spec)
        return tree_flatten(self.forward(*args, **kwargs))

    def back(self, way: WayBack) -> None:
        """Computes the layer again, once for all labels, and hands their gradients on to the layers before it."""
        inputs = [one.detach().requires_grad_() if _learns(one) else one for one in self.given]
        leaves = [(before, leaf) for before, leaf in zip(self.given, inputs, strict=True) if _learns(before)]
        outputs = [one for one in self.outputs(inputs)[0] if isinstance(one, Tensor)]
        for label, gradients in sorted(self.gradients.items()):
            reached = {place: one for place, one in gradients.items() if outputs[place].requires_grad}
            input_gradients = torch.autograd.grad(
                [outputs[place] for place in reached], [leaf for _, leaf in leaves], list(reached.values()),
                retain_graph=label + 1 < way.labels, allow_unused=True,
            )  # fmt: skip
            pairs = [(before, one) for (before, _), one in zip(leaves, input_gradients, strict=True) if one is not None]
            way.push(label, [(before, one) for before, one in pairs if not before.is_leaf])


class _Cut(torch.autograd.Function):
    """Computes a layer without a graph; the gradients of its outputs are kept with the call."""

    @staticmethod
    def forward(ctx: Any, way: WayBack, call: _LayerCall, box: list[Any], _anchor: Tensor) -> tuple[Tensor, ...]:
        # the tensors among the outputs are returned, all of them are left in the box
        ctx.way, ctx.call = way, call
        ctx.set_materialize_grads(False)
        box += call.outputs(call.given)
        tensors = tuple(one.detach() for one in box[0] if isinstance(one, Tensor))
        ctx.mark_non_differentiable(*(one for one in tensors if not one.is_floating_point()))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:  # type: ignore[override]
        sums = ctx.call.gradients.setdefault(ctx.way.label, {})
        for place, one in enumerate(gradients):
            if one is not None:
                sums[place] = sums[place] + one if place in sums else one
        return None, None, None, None


@dataclass(eq=False)
class WayBack:
    """The calls of a model's layers still to be gone back through, in order, for several labels at once.

    Autograd holds one layer's activations, and each layer is computed again once, whatever the number of labels.
    """

    labels: int
    calls: list[_LayerCall] = field(default_factory=list)
    label: int = 0

    @contextmanager
    def kept(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Cuts the graph at every layer that is called meanwhile."""

        def cut(forward: Callable[..., Any]) -> Callable[..., Any]:
            def once(*args: Any, **kwargs: Any) -> Any:
                inputs, spec = tree_flatten((args, kwargs))
                if not any(map(_learns, inputs)):
                    return forward(*args, **kwargs)
                call, box = _LayerCall(forward, inputs, spec), list[Any]()
                self.calls.append(call)
                anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device="cpu")
                tensors = iter(_Cut.apply(self, call, box, anchor))  # type: ignore[no-untyped-call]
                flat, form = box
                return tree_unflatten([next(tensors) if isinstance(one, Tensor) else one for one in flat], form)

            return once

        forwards = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers:
            layer.forward = cut(layer.forward)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer, forward in zip(layers, forwards, strict=True):
                if forward is None:
                    del layer.forward
                else:  # a hook of accelerate's, say
                    layer.forward = forward  # type: ignore[method-assign]

    def push(self, label: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Sends gradients of some tensors to the calls that made them."""
        self.label = label
        if pairs:
            tensors, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients, retain_graph=True)

    def go(self) -> None:
        """Goes back through all calls, the last one first."""
        while self.calls:
            call = self.calls.pop()
            if call.gradients:
                call.back(self)


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
    recorder, way = _Recorder(rows, choices, tensors, labels, report), WayBack(labels)
    with differentiable(arms.model), tapping(recorder.tap):
        with way.kept(arms.layers):
            hidden = arms.hidden(window)
        recorder.forward = False
        for label, gradient in enumerate(label_gradients(arms, hidden, generator, labels)):
            way.push(label, [(hidden, gradient)])
        del hidden
        way.go()
    if recorder.left:
        raise ValueError(
            f"model: no prediction depends on the attention of layers {sorted(recorder.left)}, expected that of "
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
