"""`use_plan`: another plan for a block, a thread or a request, and the model's own behind it."""

import asyncio
import copy
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import adaattn_hf
from adaattn_hf.patches.observe.spans import spans
from adaattn_hf.patches.plans.bound import BoundPlan, hooked_plans
from adaattn_hf.patches.plans.slots import BLOCKS, instead
from adaattn_hf.plans.plan import Plan, PlanError

from ..support.choices import make_choice
from ..support.models import fresh_pair, tokens
from ..support.plans import give, plan_for
from ..support.versions import needs_tracing


class Case:
    """One model, what it computes exactly and by windows of two and five tokens, and these plans."""

    def __init__(self, layers: int = 2) -> None:
        self.model = fresh_pair("llama", num_hidden_layers=layers).ours
        self.ids = tokens()
        self.plans: dict[str, Plan | None] = {"exact": None}
        self.expected = {"exact": self.logits()}
        for name, window in (("narrow", 2), ("wide", 5)):
            choice = make_choice("window", window=window)
            self.plans[name] = give(self.model, choice, layers=tuple(range(layers)))
            self.expected[name] = self.logits()
            adaattn_hf.remove_plan(self.model)

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        return self.model(input_ids=self.ids).logits  # type: ignore[no-any-return]

    def runs(self) -> str:
        found = self.logits()
        return next(name for name, logits in self.expected.items() if torch.equal(logits, found))


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.fixture
def small() -> Case:
    return Case(layers=1)


def test_blocks_nest_and_leave_nothing_behind(case: Case) -> None:
    model, plans = case.model, case.plans
    own = give(model, make_choice("window", window=5))
    assert case.runs() == "wide"
    with adaattn_hf.use_plan(model, plans["narrow"], unverified=True):
        assert case.runs() == "narrow"
        with adaattn_hf.use_plan(model, None):
            assert case.runs() == "exact"
            with adaattn_hf.use_plan(model, plans["wide"], unverified=True):
                assert case.runs() == "wide"
        assert case.runs() == "narrow"
        assert adaattn_hf.plan_of(model) == own
    with pytest.raises(KeyError), adaattn_hf.use_plan(model, None):
        raise KeyError
    assert case.runs() == "wide"
    assert not instead()
    assert not [module for module in model.modules() if BLOCKS in module.__dict__]


def test_a_profile_names_the_plan_that_runs_and_not_settings(small: Case) -> None:
    adaattn_hf.configure(small.model, adaattn_hf.AdaAttnConfig(backend="eager"))
    for name, plan in small.plans.items():
        with adaattn_hf.use_plan(small.model, plan, unverified=True), torch.profiler.profile() as seen, spans():
            small.logits()
        (span,) = {event.name for event in seen.events() if event.name.startswith("adaattn layer 0: eager")}
        assert span.endswith(" plan") is (name != "exact")


def test_threads_tasks_and_generators_have_their_own(case: Case) -> None:
    model, gate = case.model, threading.Barrier(3, timeout=100)

    def request(name: str) -> str:
        with adaattn_hf.use_plan(model, case.plans[name], unverified=True):
            gate.wait()
            runs = case.runs()
            gate.wait()
            return runs

    requests = (pool := ThreadPoolExecutor()).map(request, ("narrow", "wide"))
    gate.wait()
    assert case.runs() == "exact"  # both blocks are open
    gate.wait()
    assert [*requests] == ["narrow", "wide"]

    async def runs() -> str:
        return case.runs()

    async def serve(name: str) -> str:
        with adaattn_hf.use_plan(model, case.plans[name], unverified=True):
            await asyncio.sleep(0)
            task = asyncio.create_task(runs())
        return await task  # it keeps the plan

    async def both() -> tuple[str, ...]:
        return await asyncio.gather(serve("narrow"), serve("exact"), serve("wide"))

    assert [*asyncio.run(both())] == ["narrow", "exact", "wide"]

    def served(name: str) -> Any:
        with adaattn_hf.use_plan(model, case.plans[name], unverified=True):
            yield case.runs()

    first, second = served("narrow"), served("wide")
    assert [next(first), next(second)] == ["narrow", "wide"]
    first.close()  # before the one that was opened within
    assert case.runs() == "wide"
    pool.submit(second.close).result()  # as a collector of garbage may
    assert case.runs() == "exact"


@torch.no_grad()
def test_generation_and_named_backends_follow(case: Case) -> None:
    model, plan = case.model, case.plans["narrow"]
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    exact = model.generate(case.ids, **options)
    give(model, make_choice("window", window=2))
    planned = model.generate(case.ids, **options)
    assert not torch.equal(exact, planned)
    assert torch.equal(exact, _within(model, None, case.ids, options))
    adaattn_hf.remove_plan(model)
    assert torch.equal(planned, _within(model, plan, case.ids, options))
    for backend in ("adaattn_sdpa", "adaattn_eager"):
        model.set_attn_implementation(backend)
        with adaattn_hf.use_plan(model, plan, unverified=True):
            torch.testing.assert_close(case.logits(), case.expected["narrow"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(case.logits(), case.expected["exact"], rtol=1e-4, atol=1e-4)


def _within(model: Any, plan: Plan | None, ids: torch.Tensor, options: dict[str, Any]) -> Any:
    with adaattn_hf.use_plan(model, plan, unverified=True):
        return model.generate(ids, **options)


def test_a_plan_from_a_file_and_one_that_does_not_fit(case: Case, tmp_path: Path) -> None:
    model, plan = case.model, case.plans["narrow"]
    assert plan is not None
    (tmp_path / "adaattn_plan.json").write_text(plan.to_json(), encoding="utf-8")
    with adaattn_hf.use_plan(model, tmp_path, unverified=True):
        assert case.runs() == "narrow"
    with pytest.raises(PlanError, match="never verified"), adaattn_hf.use_plan(model, replace(plan, verified=None)):
        pass
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    fresh = Plan.from_json(plan.to_json())
    with pytest.raises(PlanError, match="weights of layer 1"), adaattn_hf.use_plan(model, fresh, unverified=True):
        pass
    with adaattn_hf.use_plan(model, plan_for(model, make_choice("window", window=2)), unverified=True):
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
        with pytest.raises(PlanError, match="weights of layer 0"):
            case.logits()
    model.set_attn_implementation("sdpa")
    with pytest.raises(PlanError, match="is 'sdpa', not one of AdaAttn's"), adaattn_hf.use_plan(model, None):
        pass


def test_training_is_refused(case: Case) -> None:
    case.model.train()
    said = r"use_plan: the model is in training mode.*model.eval\(\)"
    with adaattn_hf.use_plan(case.model, case.plans["narrow"]), pytest.raises(PlanError, match=said):
        case.logits()


@needs_tracing
@torch.no_grad()
@pytest.mark.parametrize("first", ["graph", "block"])
def test_a_graph_is_refused_while_a_block_is_open(small: Case, first: str) -> None:
    model = small.model
    whole = torch.compile(model, backend="eager", fullgraph=True)
    if first == "graph":
        torch.testing.assert_close(whole(input_ids=small.ids).logits, small.expected["exact"])
    with (
        adaattn_hf.use_plan(model, small.plans["narrow"], unverified=True),
        pytest.raises(Exception, match="use_plan_runs_outside_graphs"),
    ):
        whole(input_ids=small.ids)
    torch.testing.assert_close(whole(input_ids=small.ids).logits, small.expected["exact"])
    if first == "graph":
        return
    torch._dynamo.reset()
    model.model.layers[0].self_attn.compile(backend="eager")  # which may break where a whole graph may not
    for name in ("narrow", "exact"):
        with adaattn_hf.use_plan(model, small.plans[name], unverified=True):
            torch.testing.assert_close(small.logits(), small.expected[name])


@needs_tracing
@torch.no_grad()
def test_a_copy_made_in_a_block_is_run_by_its_own_plan_and_compiled(small: Case) -> None:
    with adaattn_hf.use_plan(small.model, small.plans["narrow"], unverified=True):
        twin = copy.deepcopy(small.model)
        torch.testing.assert_close(twin(input_ids=small.ids).logits, small.expected["exact"])
    whole = torch.compile(twin, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(input_ids=small.ids).logits, small.expected["exact"])


@needs_tracing
@torch.no_grad()
def test_a_step_outside_of_a_graph_knows_the_windows_of_its_layers() -> None:
    """A graph's mask is dense, and one row of it does not tell what a window hides from padding."""
    model = fresh_pair("mistral-window", num_hidden_layers=1).ours
    plan = plan_for(model, make_choice("window", window=2, sinks=1), layers=(0,))
    found = []
    with adaattn_hf.use_plan(model, plan, unverified=True):
        for step in (model, torch.compile(model, backend="eager")):
            cache = DynamicCache(config=model.config)
            model(tokens()[:, :10], past_key_values=cache)
            found.append(step(tokens()[:, 10:], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0])


def test_a_block_that_is_never_closed_ends_with_the_interpreter_without_a_word() -> None:
    code = """
import adaattn_hf, transformers
from adaattn_hf.eval.demo import demo_model_path as path
model = transformers.AutoModelForCausalLM.from_pretrained(path("llama"), attn_implementation="adaattn")
model.kept = lambda: block
block = adaattn_hf.use_plan(model, None)
block.__enter__()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr, done.stderr


def test_what_was_checked_dies_with_the_model() -> None:
    case = Case()
    with adaattn_hf.use_plan(case.model, case.plans["narrow"], unverified=True):
        case.logits()
    gone = weakref.ref(case.model)
    del case
    gc.collect()
    assert gone() is None


def test_hooks_that_other_threads_take_off_meanwhile(small: Case) -> None:
    trunk, bound = small.model.model, BoundPlan.of(small.model, small.plans["wide"])  # type: ignore[arg-type]
    hooks = trunk._forward_pre_hooks
    # while somebody asks whose hook it is, another thread takes all hooks off
    hook = type("Hook", (), {"__self__": property(lambda self: hooks.clear())})
    for look in (lambda: [*hooked_plans(trunk)], lambda: bound.unhook(trunk)):
        bound.hook(trunk)
        hooks[-1] = hook()
        look()
        assert not hooks
