"""A model that carries a plan: the harness sees the loss, and counts where the plan did anything."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from adaattn_cli.run import models_that_load
from adaattn_hf.errors import UsageError
from adaattn_hf.eval import report, runner, tasks
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint
from adaattn_hf.patches.plans import attach
from adaattn_hf.plans.plan import EXACT, Plan

from ..support.choices import make_choice
from ..support.command import adaattn
from ..support.plans import plan_for
from ..support.versions import PAGE
from ..support.warm import AS_A_MODULE, WarmInterpreter
from .conftest import OWN_PAGES, PAGES

WINDOW = 8


def plan_of(loaded: checkpoint.Checkpoint, window: int = WINDOW) -> Plan:
    return plan_for(loaded.model, {1: (make_choice("window", window), EXACT)}, lengths=(64, 128))


@pytest.fixture
def planned(llama: Path) -> checkpoint.Checkpoint:
    loaded = checkpoint.load(llama, device="cpu", implementation="adaattn")
    attach.load_plan(loaded.model, plan_of(loaded))
    return loaded


def kept(loaded: checkpoint.Checkpoint, directory: Path, window: int) -> str:
    """A plan beside no weights, as `adaattn calibrate --output-dir` leaves it."""
    directory.mkdir()
    plan = plan_of(loaded, window)
    (directory / "adaattn_plan.json").write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    return str(directory)


def test_two_plans_are_compared_with_each_other(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    narrow, wide = kept(loaded, tmp_path / "narrow", 4), kept(loaded, tmp_path / "wide", 24)

    def divergence(**plans: str) -> dict[str, Any]:
        against = "adaattn" if "baseline_plan" in plans else "sdpa"
        return runner.evaluate(loaded, OWN_PAGES, Settings(baseline=against, **plans))

    paired = divergence(plan=narrow, baseline_plan=wide)
    assert paired["quality"]["comparisons"][0]["kl_mean"] > 1e-6
    assert [entry["path"] for entry in paired["plans"]] == [wide, narrow]
    assert paired["quality"]["arms"][0]["role"] == "reference"
    same = divergence(plan=wide, baseline_plan=wide)
    assert same["quality"]["comparisons"][0]["kl_mean"] == 0.0
    exact = divergence(plan="none", baseline_plan="none")
    assert exact["quality"]["comparisons"][0]["delta_nll"]["mean"] == 0.0
    stock = divergence(plan=narrow)
    assert stock["activation"][1]["rate"] > 0.1
    assert stock["plans"][0] is None


def test_streaming_heads_are_measured_over_their_cache(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    """Behind a full cache the same plan computes the same; in codes it does not."""
    plan = kept(loaded, tmp_path / "plan", 16)

    def evaluated(cache: str, against: str = plan, streaming: bool = True) -> dict[str, Any]:
        return runner.evaluate(
            loaded,
            OWN_PAGES,
            Settings(
                baseline="adaattn", plan=plan, baseline_plan=against, cache=cache, cache_piece=5, streaming=streaming
            ),
        )

    assert evaluated("model")["quality"]["comparisons"][0]["kl_mean"] < 1e-9
    dropped = evaluated("model", "none")
    assert dropped["quality"]["comparisons"][0]["kl_mean"] > 1e-6
    assert "`AdaAttnCache` of model with streaming heads, by" in report.markdown([dropped])
    assert evaluated("int8")["quality"]["comparisons"][0]["kl_mean"] > 1e-9


def test_streaming_without_what_it_needs_is_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="streaming: got no cache"):
        Settings(streaming=True)
    loaded = checkpoint.load(llama, device="cpu", implementation="adaattn")
    with pytest.raises(UsageError, match="without a plan"):
        runner.evaluate(loaded, OWN_PAGES, Settings(cache="int8", streaming=True))
    attach.load_plan(loaded.model, replace(plan_of(loaded, 16), lengths=(32,)))
    with pytest.raises(UsageError, match="windows of 64 tokens and a plan that speaks for 32"):
        runner.evaluate(loaded, OWN_PAGES, Settings(cache="int8", streaming=True))


@pytest.mark.parametrize(("arguments", "says"), [
    (("--plan", "nowhere"), "does not exist"),
    (("--plan", "none", "--attn-implementation", "eager"), "knows no plans"),
    (("--baseline-plan", "none", "--baseline", "sdpa"), "knows no plans"),
])  # fmt: skip
def test_wrong_plans_are_refused(
    llama: Path, texts: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    words = ("eval", llama, "--data", texts / "plain.txt", "--output-dir", tmp_path / "out", *arguments)
    adaattn(*words, code=(2, 4), says=says)


def test_the_rate_is_counted_and_the_loss_is_seen(planned: checkpoint.Checkpoint) -> None:
    report = runner.evaluate(planned, OWN_PAGES, Settings(batch_size=2))
    lengths = [len(w.input_ids) for w in tasks.build(planned, OWN_PAGES, Settings()).windows]
    changed = sum(max(n - WINDOW, 0) for n in lengths)  # a quarter of all heads sees fewer keys there
    assert report["activation"][1]["rate"] == pytest.approx(changed / sum(lengths) / 4)
    assert report["quality"]["comparisons"][0]["kl_mean"] > 1e-6


def test_short_text_never_leaves_the_exact_path_and_the_rate_says_so(planned: checkpoint.Checkpoint) -> None:
    report = runner.evaluate(planned, OWN_PAGES, Settings(context=WINDOW))
    assert report["activation"][1]["rate"] == 0.0
    assert report["activation"][1]["pairs"] > 0
    assert report["quality"]["comparisons"][0]["kl_mean"] < 1e-9


def test_a_program_runs_the_plan_that_it_is_given(llama: Path, tmp_path: Path, interpreter: WarmInterpreter) -> None:
    """`adaattn run --plan`: the program loads a model as it always does, which runs what `load_plan` would run."""
    plan = kept(checkpoint.load(llama, device="cpu"), tmp_path / "plan", WINDOW)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation='adaattn')\n"
        "with torch.no_grad():\n"
        "    torch.save(model(torch.arange(60)[None]).logits, sys.argv[2])\n"
    )

    def logits(name: str, *words: str) -> torch.Tensor:
        out = tmp_path / name
        done = interpreter.run(AS_A_MODULE, tmp_path, "run", *words, str(program), str(llama), str(out))
        assert done.returncode == 0, done.stderr
        found: torch.Tensor = torch.load(out)
        return found

    model = checkpoint.load(llama, device="cpu", implementation="adaattn").model
    with torch.no_grad():
        exact = model(torch.arange(60)[None]).logits
        attach.load_plan(model, plan)
        planned = model(torch.arange(60)[None]).logits
    assert torch.equal(logits("with", "--plan", plan), planned)
    assert not torch.equal(exact, planned)
    assert torch.equal(logits("without"), exact)


@pytest.mark.parametrize("command", ["eval", "profile", "explain"])
def test_a_command_takes_the_dtype_of_the_plan_and_refuses_another_one(
    command: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = kept(checkpoint.load(llama, dtype="bfloat16", device="cpu"), tmp_path / "plan", WINDOW)
    (tmp_path / "text.txt").write_text("".join(PAGES))
    words = [command, llama, "--device", "cpu", "--plan", plan]
    words += [] if command == "explain" else ["--data", "text.txt"]
    adaattn(*words, "--json", says=() if command == "profile" else "bfloat16")
    refusal = adaattn(*words, "--dtype", "float32", code=2, says="give --dtype bfloat16, or leave --dtype out")
    assert "torch." not in refusal.stderr


def test_a_program_is_not_started_with_a_plan_that_is_none(tmp_path: Path) -> None:
    done = adaattn("run", "--plan", tmp_path, "-m", "this", code=2, says="error: plan: ")
    assert done.stdout == ""


def test_a_model_that_is_loaded_under_the_command_is_bound_and_can_be_unbound(llama: Path, tmp_path: Path) -> None:
    plan = kept(checkpoint.load(llama, device="cpu"), tmp_path / "plan", WINDOW)
    with models_that_load(Plan.from_pretrained(plan), None):
        one, other = (checkpoint.load(llama, device="cpu", implementation="adaattn").model for _ in range(2))
        stock = checkpoint.load(llama, device="cpu", implementation="sdpa").model
    attach.remove_plan(one)
    with torch.no_grad():
        exact, planned = (model(torch.arange(60)[None]).logits for model in (one, other))
    assert not torch.equal(exact, planned)
    assert attach.plan_of(one) is attach.plan_of(stock) is None
    assert attach.plan_of(other) == Plan.from_pretrained(plan)
    assert attach.plan_of(checkpoint.load(llama, device="cpu", implementation="adaattn").model) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [True, False])
def test_an_engine_that_is_started_under_the_command_runs_the_plan(
    llama: Path, tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program names no attention and opens no block; what it sets in the engine's configuration stays."""
    psutil = pytest.importorskip("psutil")
    held = psutil.Process().memory_info().rss  # what is free beside it is what the engine takes, if nothing is set
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=held + (2 << 30), available=2 << 30))
    plan = Plan.from_pretrained(kept(checkpoint.load(llama, device="cpu"), tmp_path / "plan", WINDOW))
    program = transformers.AutoModelForCausalLM
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, **{PAGE: 32}) if given else None
    prompts = [list(range(3, 40)), list(range(50, 60))]
    with models_that_load(plan, "adaattn"):
        model = program.from_pretrained(llama).eval()
        stock = program.from_pretrained(llama, attn_implementation="sdpa")
        manager = model.init_continuous_batching(settings, sizes)
        assert manager.continuous_batching_config.num_blocks == (8 if given else None)
        manager.stop()
        answers = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=sizes)
        assert attach.plan_of(model) == plan
        found = [answer.generated_tokens for answer in answers.values()]
        right = [model.generate(torch.tensor([p]), generation_config=settings)[0, len(p) :].tolist() for p in prompts]
    assert stock.config._attn_implementation == "sdpa"
    assert found == right
    exact = attach.remove_plan(model).generate(torch.tensor([prompts[0]]), generation_config=settings)
    assert exact[0, len(prompts[0]) :].tolist() != right[0], "the plan changed nothing"


def test_an_attention_of_no_such_name_is_refused() -> None:
    adaattn("run", "--attention", "sdpa", "-m", "this", code=2, says="--attention: got 'sdpa', expected one of adaattn")


def test_no_room_for_a_batch_is_a_sentence(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(runner, "evaluate", full)
    text = tmp_path / "text.txt"
    text.write_text(PAGES[0])
    words = ["--context", "64", "--batch-size", "4", "--output-dir", str(tmp_path / "out"), "--device", "cpu"]
    says = ("Tried to allocate 2.00 GiB", "--batch-size 2", "--context 32", "--resume")
    adaattn("eval", llama, "--data", text, *words, code=6, says=says)
