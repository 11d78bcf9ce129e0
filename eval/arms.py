"""Runs a model with exact attention and with a plan (two arms) on the same tokens, and scores both.

The base model computes the last hidden states, and its head turns them into logits chunk by chunk, so that memory holds
one chunk of logits only. It is checked once per model that `head(hidden)` equals the model's logits. A head that also
transforms, caps or scales is run through the model's own forward pass; if that fails too, whole logits are used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import BITS
from adaattn_hf.attention.listeners import Tap, tapping
from adaattn_hf.attention.stored import StoredKV, direction_of, mean_of, quantise
from adaattn_hf.backends import select
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.stats.paired import TokenScores, joined, score_tokens

from .windows import TokenWindow

CHUNK = 256
"""Positions projected to the vocabulary at a time."""
FIRST = 64
"""First tokens whose keys give the mean that is subtracted, as a cache does for a short prompt."""


class ModelArms:
    """A model, `model(input_ids)` giving `logits`, split into its base model (the body) and its head.

    `attentions` are its attention modules in the order of their calls; `layers` parts with at most one of them each,
    which hold nearly all of a pass's activations.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        body = getattr(model, "base_model", None)
        self._body: nn.Module | None = None if body is model else body
        get_head = getattr(model, "get_output_embeddings", None)
        projection = get_head() if callable(get_head) else None
        if projection is None:
            raise ValueError(
                f"model: got {type(model).__name__}, which has no language-model head, expected one that predicts "
                "tokens (…ForCausalLM, …LMHeadModel, …ForMaskedLM): without predictions there is no loss to keep a "
                "budget of; calibrate the checkpoint with its head, and give its plan to this model with "
                "adaattn_hf.load_plan(model, directory)"
            )
        self.attentions: list[nn.Module] = []
        probe = torch.arange(1, 9, device=self.device)[None]

        def listen(module: nn.Module, call: AttentionCall) -> Tensor:
            self.attentions.append(module)
            return exact_tap(module, call)

        with torch.no_grad(), tapping(listen):
            whole: Tensor = model(input_ids=probe).logits
        self.layers = layers_of(model, self.attentions)
        self._head: Callable[[Tensor], Tensor] | None = None
        if self._body is None:
            return
        with torch.no_grad(), tapping(exact_tap):
            states: Tensor = self._body(input_ids=probe).last_hidden_state
            heads: list[Callable[[Tensor], Tensor]] = [projection, self._head_of_forward]
            if getattr(projection, "in_features", states.shape[-1]) != states.shape[-1]:
                heads.pop(0)  # the head transforms the states first
            for head in heads:
                parts = head(states).to(whole.device)
                if whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-4, atol=1e-4):
                    self._head = head
                    break

    def _head_of_forward(self, states: Tensor) -> Tensor:
        """Computes the logits of hidden states by the model's own forward pass.

        The body runs on one token, and a hook replaces its output by these states, so that the model applies whatever
        follows the body (a transform, a norm, a cap on the logits) to them.
        """

        def replaced(_module: nn.Module, _inputs: object, output: Any) -> Any:
            output["last_hidden_state"] = states
            return output

        assert self._body is not None
        handle = self._body.register_forward_hook(replaced)
        try:
            with tapping(exact_tap):
                logits: Tensor = self.model(input_ids=torch.ones(1, 1, dtype=torch.long, device=self.device)).logits
        finally:
            handle.remove()
        return logits

    def tokens(self, window: TokenWindow) -> Tensor:
        """Returns the token ids of a window `[1, length]` on the device of the model."""
        return torch.from_numpy(window.input_ids)[None].to(self.device)

    def hidden(self, window: TokenWindow) -> Tensor:
        """Returns the last hidden states of the predictions `[1, predictions, width]`, logits if no head was found."""
        whole = self._body if self._head is not None else self.model
        assert whole is not None
        options = {"use_cache": False} if "use_cache" in signature(whole.forward).parameters else {}
        output = whole(input_ids=self.tokens(window), **options)
        states: Tensor = output.logits if self._head is None else output.last_hidden_state
        return states if window.positions is None else states[:, torch.from_numpy(window.positions).to(states.device)]

    @torch.no_grad()
    def exact(self, window: TokenWindow) -> Tensor:
        """Returns `hidden` under exact attention, ignoring the model's plan."""
        with tapping(exact_tap):
            return self.hidden(window)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the fp32 logits of some hidden states."""
        return (hidden if self._head is None else self._head(hidden)).float()

    def chunks(self, *hidden: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yields the first position and the logits `[1, chunk, vocabulary]` of each arm, chunk by chunk."""
        for start in range(0, hidden[0].shape[1], CHUNK):
            yield start, tuple(self.logits(state[:, start : start + CHUNK].to(self.device)) for state in hidden)


def layers_of(model: nn.Module, attentions: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the items of the outermost lists whose items hold at most one attention module each.

    An attention module outside of such lists stands for itself.
    """
    layers: list[nn.Module] = []
    unplaced = set(attentions)
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or any(
            isinstance(item, (nn.ModuleList, nn.ModuleDict)) for item in module
        ):
            continue
        inside = [unplaced.intersection(item.modules()) for item in module]
        if any(inside) and all(len(one) <= 1 for one in inside):
            layers += module
            unplaced = unplaced.difference(*inside)
    return list(dict.fromkeys((*layers, *unplaced)))


def exact_tap(module: nn.Module, call: AttentionCall) -> Tensor:
    """Computes exact attention, ignoring the module's plan."""
    return select.attend(call).out


def layer_of(module: nn.Module, call: AttentionCall) -> int:
    """Returns the number of the layer that makes a request, and refuses a layer without one."""
    if call.layer is None:
        raise ValueError(
            f"{type(module).__name__} has no layer_idx: a plan could not name its layer; plans serve models whose "
            "attention modules are numbered (LLaMA, GPT-2, BERT and their kin)"
        )
    return call.layer


def plan_tap(bound_layers: Mapping[int, BoundLayer]) -> Tap:
    """Returns a tap that runs the program of each layer, exact attention in layers without one."""

    def tap(module: nn.Module, call: AttentionCall) -> Tensor:
        bound_layer = None if call.layer is None else bound_layers.get(call.layer)
        return exact_tap(module, call) if bound_layer is None else execute.attend(bound_layer, call).out

    return tap


def stored_tap(bound_layers: Mapping[int, BoundLayer], stored: str) -> Tap:
    """Returns a `plan_tap` that computes over keys and values as a cache of the format `stored` keeps them."""
    tap = plan_tap(bound_layers)
    return tap if stored == "model" else lambda module, call: tap(module, over_codes(call, stored))


def over_codes(call: AttentionCall, stored: str) -> AttentionCall:
    """Returns the request with keys and values quantised as a cache would."""
    key, value = call.key, call.value
    mean = mean_of(key[:, :, :FIRST])
    along = direction_of(call.query[:, :, :FIRST], key.shape[1])
    keys, key_scale = quantise(key, mean=mean, along=along)
    values, value_scale = quantise(value, bits=BITS[stored])
    record = StoredKV(key_scale, value_scale, mean, key[:, :, 0].float().contiguous())
    return replace(call, key=keys, value=values, stored=record)


@torch.no_grad()
def compare(arms: ModelArms, window: TokenWindow, tap: Tap, exact: Tensor | None = None) -> TokenScores:
    """Returns the paired scores of a window under exact attention and under a tap, which must all be finite.

    `exact` are hidden states of the first arm, computed if absent.
    """
    exact = arms.exact(window) if exact is None else exact
    with tapping(tap):
        planned = arms.hidden(window)
    targets = torch.from_numpy(window.targets).to(planned.device)
    scores = joined(
        [
            score_tokens((left[0], right[0]), targets[start : start + left.shape[1]].to(left.device))
            for start, (left, right) in arms.chunks(exact[:, : len(targets)], planned[:, : len(targets)])
        ]
    )
    for name, nll in zip(("exact attention", "the plan"), scores.nll, strict=True):
        refuse_infinite(np.isfinite(nll), name)
    return scores


def refuse_infinite(finite: NDArray[np.bool_], name: str) -> None:
    """Refuses losses that have no difference; `finite` `[tokens]` says which losses are finite."""
    if not finite.all():
        raise ValueError(
            f"model: {name} gives {(~finite).sum()} of {len(finite)} tokens a loss of nan or infinity, expected finite "
            "ones: no difference of them can be kept inside a budget; load the model in bfloat16 or float32, or leave "
            "out the text that it cannot read"
        )
