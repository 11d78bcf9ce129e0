"""Choices by the fields that a plan's JSON has."""

from adaattn_hf.plans.choices import Choice, Precision


def make_choice(
    kind: str = "exact", window: int = 0, sinks: int = 0, rank: int = 0, precision: str = "model"
) -> Choice:
    fields = {"kind": kind, "window": window, "sinks": sinks, "rank": rank, "precision": precision}
    return Choice.from_dict(fields)


def precision_of(choice: Choice) -> str:
    """The precision of a choice, `model` where it computes in the dtype at hand."""
    return next((part.precision for part in choice.operands if isinstance(part, Precision)), "model")
