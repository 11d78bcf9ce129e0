"""`adaattn run`: runs somebody's Python program with our attention names, plans and continuous batching."""

import dataclasses
import functools
import importlib.metadata
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousMixin

import adaattn_hf  # registers the names
from adaattn_hf.errors import UsageError
from adaattn_hf.patches.models.support import runs_ours
from adaattn_hf.patches.plans.attach import load_carried
from adaattn_hf.plans.plan import Plan, PlanError

from .ending import leave
from .options import Done, Options


def run(options: Options) -> Done:
    """Runs the program in this process; its arguments are those behind it."""
    words = list(options.command)
    try:
        plan = None if options.plan is None else Plan.from_pretrained(options.plan)
        if plan is not None:
            plan.tensor_bytes()  # a PlanError where its tensors are lost
            if plan.model_type not in CONFIG_MAPPING:
                raise PlanError(
                    f"plan: its model_type is {plan.model_type!r}, which no configuration of Transformers has; load it "
                    "in the program, by adaattn_hf.load_plan(model, directory)"
                )
    except (PlanError, OSError) as error:
        leave(UsageError(f"plan: {str(error).removeprefix('plan: ')}"))
    if options.attention not in (None, *adaattn_hf.NAMES):
        leave(UsageError(f"--attention: got {options.attention!r}, expected one of {', '.join(adaattn_hf.NAMES)}"))
    with models_that_load(plan, options.attention):
        module = words[0] == "-m" and len(words) > 1
        sys.argv = words[module:]
        if module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif Path(words[0]).is_file():
            sys.path.insert(0, str(Path(words[0]).resolve().parent))  # as `python FILE.py` does
            runpy.run_path(words[0], run_name="__main__")
        else:
            scripts = importlib.metadata.entry_points(group="console_scripts", name=words[0])
            if not scripts:
                expected = f"a file, -m MODULE or a Python program installed in {sys.prefix}"
                remedy = "Python itself is not named: adaattn run train.py"
                leave(UsageError(f"command: got {words[0]!r}, expected {expected}; {remedy}"))
            raise SystemExit(next(iter(scripts)).load()())
    return Done()


@contextmanager
def models_that_load(plan: Plan | None, attention: str | None) -> Iterator[None]:
    """Within, models of a program that cannot call us: it names no attention, binds no plan and opens no block.

    `from_pretrained` takes `attention` where none is named, and binds the plan that a model for our attention carries
    (models of the type of `plan` that carry none get that one). `init_continuous_batching` of such a model is inside
    `continuous_batching` until its manager stops. Two methods are wrapped: the process is the command's own.
    """
    load: Any = vars(PreTrainedModel)["from_pretrained"]
    start: Any = ContinuousMixin.init_continuous_batching

    @functools.wraps(load.__func__)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        named = kwargs.get("attn_implementation") or getattr(kwargs.get("config"), "_attn_implementation", None)
        if attention and not named:
            kwargs["attn_implementation"] = attention
        loaded = load.__func__(cls, *args, **kwargs)
        load_carried(loaded[0] if isinstance(loaded, tuple) else loaded, plan)  # with `output_loading_info`
        return loaded

    @functools.wraps(start)
    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        if not runs_ours(self):
            return start(self, generation_config, continuous_batching_config, workload_hints)
        with ExitStack() as block:
            ours, theirs = block.enter_context(adaattn_hf.continuous_batching(self)), continuous_batching_config
            fields = () if theirs is None else dataclasses.fields(ContinuousBatchingConfig)
            changes = {one.name: value for one in fields if (value := getattr(theirs, one.name)) != one.default}
            manager = start(self, generation_config, dataclasses.replace(ours, **changes), workload_hints)
            until_stopped, stop = block.pop_all(), manager.stop

            def stop_and_leave(*args: Any, **kwargs: Any) -> None:
                with until_stopped:
                    stop(*args, **kwargs)

            manager.stop = stop_and_leave
        return manager

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]
    ContinuousMixin.init_continuous_batching = init_continuous_batching  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load  # type: ignore[method-assign]
        ContinuousMixin.init_continuous_batching = start  # type: ignore[method-assign]
