"""A Trainer callback that adds counts of backends and the plan's predictions to every log."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import CallKind
from adaattn_hf.attention.listeners import Listener, listening
from adaattn_hf.backends.select import choose
from adaattn_hf.plans.limits import unproven

from ..plans.attach import plan_of

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


class _Calls(Listener):
    # counts the calls of a thread by their kind, and the backend that was asked for by name
    def __init__(self) -> None:
        self.counts: Counter[tuple[CallKind, str | None]] = Counter()

    def before(self, module: nn.Module, call: AttentionCall) -> None:
        self.counts[call.checked_kind(), call.backend] += 1


def plan_statistics(model: nn.Module) -> dict[str, float]:
    """Returns what a model's plan predicts, as numbers for a logger; empty for a model without a plan.

    These are the key/value heads per kind of choice and in all, the predicted loss (the sum of the risks, nats/token),
    the predicted price as a share of the exact price, and the verified bound on the loss, if there is one.
    """
    plan = plan_of(model)
    if plan is None:
        return {}
    kinds = Counter("exact" if c.is_exact else c.kind for layer in plan.layers for c in layer.choices)
    exact = sum(unit.exact_price for unit in plan.units)
    numbers = {
        "adaattn/plan/heads": float(sum(kinds.values())),
        "adaattn/plan/predicted_risk": plan.predicted_loss,
        **{f"adaattn/plan/{kind}": float(count) for kind, count in sorted(kinds.items())},
    }
    if exact > 0:
        numbers["adaattn/plan/price"] = sum(unit.price for unit in plan.units) / exact
    if plan.verified is not None and unproven(plan) is None:
        numbers["adaattn/plan/verified_upper"] = plan.verified.upper
    return numbers


class AdaAttnCallback(TrainerCallback):
    """Adds AdaAttn's numbers to the logs of a Trainer.

    `Trainer(callbacks=[AdaAttnCallback()])` adds them to `state.log_history` and the printed lines.
    `AdaAttnCallback().attach(trainer)` also runs before all other callbacks, so that TensorBoard, W&B and every other
    reporter gets them.
    """

    def __init__(self) -> None:
        """Creates a callback, which counts from the beginning of training to its end."""
        self._calls = _Calls()
        self._listening = ExitStack()
        self._plan: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> AdaAttnCallback:
        """Put this callback before all others of a Trainer."""
        others = [c for c in trainer.callback_handler.callbacks if c is not self]
        trainer.callback_handler.callbacks = [self, *others]
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the plan and begin to count."""
        self._listening.close()
        self._calls = self._listening.enter_context(listening(_Calls()))
        self._plan = plan_statistics(kwargs["model"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the numbers to the log that is being written."""
        numbers: dict[str, float] = {}
        if total := sum(self._calls.counts.values()):
            shares: Counter[str] = Counter()
            for (kind, forced), count in self._calls.counts.items():
                shares[f"adaattn/backend/{choose(kind, forced).name}"] += count
                shares[f"adaattn/structure/{kind.shape}"] += count
            numbers = {"adaattn/calls": float(total), **{name: count / total for name, count in sorted(shares.items())}}
            self._calls.counts.clear()
        numbers |= self._plan
        logs: dict[str, float] | None = kwargs.get("logs")
        if logs is not None:
            logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop counting."""
        self._listening.close()
