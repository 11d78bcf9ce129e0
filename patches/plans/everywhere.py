"""Binds plans to the models that a program loads by itself, under `adaattn run`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel

from adaattn_hf.plans.plan import Plan, PlanError

from .attach import load_carried


def bind_when_loaded(plan: Plan | None) -> Callable[[], None]:
    """From here on, binds to each model that `from_pretrained` loads for our attention the plan that it carries.

    Models of the type of `plan` that carry none get that one. The program that loads them cannot call `load_plan`, so
    its class method is wrapped: the process is the command's own.

    Returns:
        A function that ends it.

    Raises:
        PlanError: No configuration of Transformers has the plan's type, or its tensors are lost.
    """
    if plan is not None:
        plan.tensor_bytes()
        if plan.model_type not in CONFIG_MAPPING:
            raise PlanError(
                f"model_type is {plan.model_type!r}, which no configuration of Transformers has; load the plan in the "
                "program, by adaattn_hf.load_plan(model, directory)"
            )
    plain: Any = vars(PreTrainedModel)["from_pretrained"]

    @functools.wraps(plain.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = plain.__func__(cls, *args, **kwargs)
        load_carried(loaded[0] if isinstance(loaded, tuple) else loaded, plan)  # with `output_loading_info`
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]
    return functools.partial(setattr, PreTrainedModel, "from_pretrained", plain)
