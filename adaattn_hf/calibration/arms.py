"""Running a model's exact and planned arm on the same tokens, with the vocabulary projection done in pieces.

A forward to the last hidden state and a chunked projection keep memory at one chunk of logits. Whether
`head(hidden)` is what the model returns is checked once per model; where it is not (capped or scaled logits)
the model's own logits are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adaattn_hf import execute
from adaattn_hf.approximate import LayerTensors, Program
from adaattn_hf.backends.select import choose
from adaattn_hf.plan import Plan
from adaattn_hf.request import AttentionRequest, CallSpec
from adaattn_hf.tap import Tap, tapping

CHUNK = 256
"""Positions projected to the vocabulary at a time."""


class ModelArms:
    """A model seen as body and head.

    Attributes:
        model: The model, `model(input_ids)` giving `logits`.
        device: Where its weights are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._body = getattr(model, "base_model", None)
        get_head = getattr(model, "get_output_embeddings", None)
        self._head: nn.Module | None = get_head() if callable(get_head) else None
        self._split = self._check()

    def _check(self) -> bool:
        if self._body is None or self._body is self.model or self._head is None:
            return False
        probe = torch.arange(1, 9, device=self.device)[None]
        with torch.no_grad(), tapping(None):
            whole = self.model(input_ids=probe).logits
            parts = self._head(self._body(input_ids=probe).last_hidden_state)
        return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=1e-4, atol=1e-4)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the last hidden state `[1, n, width]`, or the logits where the model cannot be split."""
        if self._split and self._body is not None:
            state: Tensor = self._body(input_ids=tokens, use_cache=False).last_hidden_state
            return state
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def exact(self, tokens: Tensor) -> Tensor:
        """Returns the last hidden state under exact attention, whatever plan the model carries."""
        with tapping(exact_tap):
            return self.hidden(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns fp32 logits of a stretch of hidden states."""
        if self._split and self._head is not None:
            return torch.as_tensor(self._head(hidden)).float()
        return hidden.float()

    def chunks(self, *hidden: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yields the first position and the logits `[1, chunk, vocabulary]` of each arm, chunk by chunk."""
        for start in range(0, hidden[0].shape[1], CHUNK):
            yield start, tuple(self.logits(state[:, start : start + CHUNK]) for state in hidden)


def exact_tap(module: nn.Module, request: AttentionRequest) -> Tensor:
    """Answers with exact attention, whatever plan the module carries."""
    return choose(CallSpec.of(request)).attend(request).out


def plan_tap(programs: Mapping[int, Program]) -> Tap:
    """Returns a tap that runs the programs by layer index, exact where there is none."""

    def tap(module: nn.Module, request: AttentionRequest) -> Tensor:
        program = programs.get(int(module.layer_idx))  # type: ignore[arg-type]
        if program is None:
            return exact_tap(module, request)
        return execute.attend(program, request).out

    return tap


def programs_of(plan: Plan, tensors: Mapping[int, LayerTensors]) -> dict[int, Program]:
    """Returns the programs of a plan's layers, with tensors by layer index."""
    return {
        layer.layer: Program(layer, tensors.get(layer.layer, LayerTensors()), plan.max_length)
        for layer in plan.layers
        if not layer.is_exact
    }


@dataclass(frozen=True)
class TokenScores:
    """Paired scores of one sequence, one entry per predicted token.

    Attributes:
        stock: Negative log-likelihood of exact attention, nats.
        planned: The same under the plan.
        kl: KL(stock || plan), nats.
        agree: Whether the likeliest tokens are the same.
    """

    stock: Tensor
    planned: Tensor
    kl: Tensor
    agree: Tensor

    def cpu(self) -> TokenScores:
        """Returns the scores in the host's memory."""
        return TokenScores(self.stock.cpu(), self.planned.cpu(), self.kl.cpu(), self.agree.cpu())

    @property
    def delta(self) -> Tensor:
        """Difference of the negative log-likelihoods, plan - stock."""
        return self.planned - self.stock


@torch.no_grad()
def compare(arms: ModelArms, tokens: Tensor, tap: Tap, exact: Tensor | None = None) -> TokenScores:
    """Returns the paired scores of a sequence `[1, n]` under exact attention and under a tap.

    Args:
        arms: The model.
        tokens: Token ids `[1, n]`.
        tap: Answers the attention calls of the second arm.
        exact: Hidden states of the first arm, if they are known already.
    """
    if exact is None:
        exact = arms.exact(tokens)
    with tapping(tap):
        planned = arms.hidden(tokens)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    target = tokens[0, 1:]
    for start, (left, right) in arms.chunks(exact[:, :-1], planned[:, :-1]):
        stop = start + left.shape[1]
        wanted = target[start:stop, None]
        first, second = left[0].double().log_softmax(-1), right[0].double().log_softmax(-1)
        parts.append(
            (
                -first.gather(1, wanted)[:, 0],
                -second.gather(1, wanted)[:, 0],
                (first.exp() * (first - second)).sum(-1),
                first.argmax(-1) == second.argmax(-1),
            )
        )
    stock, plan, kl, agree = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenScores(stock, plan, kl, agree)


Progress = Callable[[str, int, int], None]
"""Told the name of a stage, how much of it is done and how much there is."""


def silent(stage: str, done: int, total: int) -> None:
    """Tells nobody."""
