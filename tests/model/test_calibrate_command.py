"""`adaattn calibrate` as a user meets it: exit codes, sentences, progress, Ctrl-C, what it leaves."""

from __future__ import annotations

import errno
import io
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

import adaattn_hf
from adaattn_hf.calibration import calibrate as calibration
from adaattn_hf.calibration import fisher, pricing
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.state import FILE, RISKS_FILE, CalibrationState
from adaattn_hf.cli.calibrate import Asked
from adaattn_hf.cli.calibration_job import BUDGET_NOT_MET, Job, evaluation, work_of
from adaattn_hf.cli.main import app
from adaattn_hf.cli.options import tokens
from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from adaattn_hf.eval.progress import Display, shown_progress
from adaattn_hf.plans.plan import PlanError
from adaattn_hf.policy.prices import Price

from ..support.calibration import price_table
from ..support.processor import ROUNDS_BF16

LENGTH = 192


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A text and a price table in which bf16 costs half."""
    directory = tmp_path_factory.mktemp("material")
    text, prices = directory / "text.txt", directory / "prices.json"
    text.write_text("\n\n".join(calibration_pages()[:12]), encoding="utf-8")
    row = {"exact": Price(1e-4, 1.0), "bf16": Price(1e-4, 0.5)}
    prices.write_text(price_table(LENGTH, row).to_json())
    return str(text), str(prices)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path("llama"), tmp_path / "model"))


def arguments(model: Path, material: tuple[str, str]) -> list[str]:
    size = f"--lengths {LENGTH} --sequences 2 --rows 16 --labels 1 --held-out 4 --most-held-out 4"
    options = f"--in-place {size} --bolder 0 --families bf16 --tries 1"
    return ["calibrate", str(model), "--data", material[0], "--prices", material[1], *options.split()]


def run(model: Path, material: tuple[str, str], *more: str) -> Result:
    """The command, with the plan in the model unless `--output-dir` is among the words."""
    words = arguments(model, material)
    if "--output-dir" in more:
        words.remove("--in-place")
    return CliRunner().invoke(app, [*words, *more])


@pytest.fixture(scope="module")
def made(material: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that carries a proven plan, for `planned` to copy."""
    found = Path(shutil.copytree(demo_model_path("llama"), tmp_path_factory.mktemp("made") / "model"))
    assert run(found, material, "--budget", "1%").exit_code == 0
    return found


@pytest.fixture
def planned(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def test_a_plan_is_made_shown_stored_reloaded_and_refused_elsewhere(model: Path, material: tuple[str, str]) -> None:
    done = run(model, material, "--budget", "1%")
    assert done.exit_code == 0, done.output
    assert ", \n" not in done.output
    for words in (
        "risk: done after",
        "bf16",
        "bf16: products in bfloat16",
        "perplexity ",
        ", allowed +1 % (95 %, held-out text) · whole model ",
        f"plan: {model}",
        "load_plan(model, ",
        f"adaattn eval {model} --plan {model} --data {material[0]}",
    ):
        assert words in done.output, words
    assert done.output.count(", at most ") == 1
    assert "nats" not in done.output.partition("allowed +1 %")[2]
    plan = (model / "adaattn_plan.json").read_bytes()
    done = run(model, material, "--budget", "1%", "--quiet")
    assert done.exit_code == 0
    assert (model / "adaattn_plan.json").read_bytes() == plan
    shown = CliRunner().invoke(app, ["plan", "show", str(model)])
    assert shown.exit_code == 0
    line = next(one for one in done.output.splitlines() if one.startswith("model: perplexity "))
    assert line in shown.output
    assert "nats/token" not in shown.output
    verbose = CliRunner().invoke(app, ["plan", "show", "--plan", str(model), "--verbose"])
    assert all(words in verbose.output for words in (line, "budget +1 %, 9.95e-3 nats/token", "passed: "))

    picture = model / "pictures" / "plan.png"
    absent = CliRunner().invoke(app, ["plan", "show", str(model), "--png", str(picture)])
    assert absent.exit_code == 2
    assert not picture.parent.exists()
    picture.parent.mkdir()
    assert CliRunner().invoke(app, ["plan", "show", str(model), "--png", str(picture)]).exit_code == 0
    assert picture.read_bytes()[1:4] == b"PNG"
    page = model / "pictures" / "plan.html"
    assert CliRunner().invoke(app, ["plan", "show", str(model), "--html", str(page)]).exit_code == 0
    assert all(words in page.read_text() for words in ("<title>model</title>", '"bf16"', r"\u0394nll", "whole model"))
    for refused, words in (
        (["show", str(model), "--png", f"{__file__}/plan.png"], "test_calibrate_command.py does not exist"),
        (["show", str(model), "--html", f"{__file__}/plan.html"], "test_calibrate_command.py does not exist"),
        (["diff", str(model), str(model), "--png", "plan.png"], "No such option: --png"),
    ):
        wrong = CliRunner().invoke(app, ["plan", *refused])
        assert (wrong.exit_code, words in wrong.stderr) == (2, True), wrong.stderr

    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn")
    assert adaattn_hf.plan_of(adaattn_hf.load_plan(loaded)).to_json().encode() == plan
    inputs = torch.arange(64)[None]
    with torch.no_grad():
        planned = loaded(inputs).logits
        adaattn_hf.remove_plan(loaded)
        assert torch.equal(planned, loaded(inputs).logits) == (not ROUNDS_BF16), "the plan is one of bf16"
    half = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn", dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="calibrated in float32, the model is loaded in bfloat16"):
        half(inputs)
    tuned = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn")
    with torch.no_grad():
        tuned.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
    with pytest.raises(PlanError, match="weights of the model are not those"):
        tuned(inputs)


def test_the_command_that_compares_a_plan_with_stock_attention_runs_as_it_is_printed(
    model: Path, material: tuple[str, str], tmp_path: Path
) -> None:
    done = run(model, material, "--budget", "1%", "--output-dir", str(tmp_path / "plan"))
    (line,) = (one for one in done.output.splitlines() if one.startswith("compare with stock attention: "))
    words = shlex.split(line.partition(": adaattn ")[2])
    compared = CliRunner().invoke(app, [*words, "--limit-tokens", "256", "--output-dir", str(tmp_path / "eval")])
    assert compared.exit_code == 0, compared.output


def test_that_command_names_the_dtype_and_the_gguf_file() -> None:
    job = Job(
        model="m",
        data=(Path("t.txt"),),
        verify_data=None,
        target=Path("p"),
        settings=CalibrationSettings(),
        prices=None,
        asked=Asked(gguf_file="a b.gguf", trust_remote_code=True),
    )
    known = "adaattn eval m --plan p --dtype bfloat16 --gguf-file 'a b.gguf' --trust-remote-code"
    assert evaluation(job, "bfloat16") == f"{known} --windows strided --data t.txt"


def test_json_is_all_that_standard_output_holds(model: Path, material: tuple[str, str]) -> None:
    done = run(model, material, "--budget", "1%", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["plan"] == json.loads((model / "adaattn_plan.json").read_text())
    assert told["report"]["table"]["choices"] == ["exact", "bf16"]
    assert ", at most " in done.stderr


def test_a_tokenizer_that_needs_a_package_is_a_sentence(
    model: Path, material: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("Please install gguf>=0.10.0")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", absent)
    done = CliRunner().invoke(app, ["calibrate", str(model), "--data", material[0]])
    assert (done.exit_code, "Please install gguf" in done.stderr) == (2, True), done.output


def test_a_plan_without_weights_is_no_model(material: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "adaattn_plan.json").write_text("{}")
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path), "--data", material[0]])
    assert (done.exit_code, "holds a plan and no weights" in done.stderr) == (2, True), done.output


def test_text_that_is_named_twice_proves_nothing(model: Path, material: tuple[str, str]) -> None:
    done = run(model, material, "--verify-data", material[0])
    assert (done.exit_code, "expected each text once" in done.stderr) == (2, True), done.output
    assert not (model / "adaattn_plan.json").exists()


def test_a_budget_that_cannot_be_met_has_a_code_and_a_sentence(model: Path, material: tuple[str, str]) -> None:
    done = run(model, material, "--budget", "1e-9")
    assert done.exit_code == BUDGET_NOT_MET
    assert "the budget of +1.0e-7 % cannot be met" in done.output
    assert "the plan is exact" in done.output
    assert json.loads((model / "adaattn_plan.json").read_text())["layers"] == []


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the passes that measure risks."""
    calls = Mock(side_effect=fisher.measure)
    monkeypatch.setattr(fisher, "measure", calls)
    return calls


def test_budgets_of_one_run_are_measured_once_and_make_the_plans_that_each_makes_alone(
    made: Path, model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    out = tmp_path / "plans"
    both = ("--budget", "1e-9", "--budget", "1%", "--output-dir", str(out))
    done = run(model, material, *both, "--json")
    assert done.exit_code == BUDGET_NOT_MET, done.output
    assert calls.call_count == 3, "one pass for each sequence, and one for needles"
    told = json.loads(done.stdout)
    assert list(told) == ["1e-09nats", "1pct"]
    assert told["1e-09nats"]["plan"]["layers"] == []
    plan = (out / "1pct" / "adaattn_plan.json").read_bytes()
    assert plan == (made / "adaattn_plan.json").read_bytes()
    assert json.loads(plan) == told["1pct"]["plan"]
    assert all(words in done.stderr for words in ("the plan is exact", ", allowed +1 % (95 %", f"plan: {out}/1pct"))
    assert sorted(one.name for one in out.iterdir()) == ["1e-09nats", "1pct"], "nothing is left to resume"


def test_risks_of_an_earlier_run_are_priced_searched_and_proved_anew_and_not_measured(
    made: Path, model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "measure", Mock(side_effect=AssertionError("a risk pass ran")))
    words = [word for word in arguments(model, material) if word != "--in-place"]
    for name in ("--sequences", "--rows", "--labels"):  # are those of that run
        del words[words.index(name) : words.index(name) + 2]
    out = tmp_path / "plan"
    done = CliRunner().invoke(app, [*words, "--budget", "1%", "--from", str(made), "--output-dir", str(out)])
    assert done.exit_code == 0, done.output
    assert f"risks: those of {made / RISKS_FILE}\n" in done.output
    assert (out / "adaattn_plan.json").read_bytes() == (made / "adaattn_plan.json").read_bytes()
    dear = tmp_path / "dear.json"
    dear.write_text(price_table(LENGTH, {"exact": 1.0, "bf16": 2.0, "int8": 0.1}).to_json())
    again = [*words, "--prices", str(dear), "--families", "bf16,int8", "--budget", "1%"]
    plan = str(out / "adaattn_plan.json")  # its file, and risks that travelled on
    done = CliRunner().invoke(app, [*again, "--from", plan, "--output-dir", str(tmp_path / "other")])
    assert (done.exit_code, "no choice saves time" in done.output) == (BUDGET_NOT_MET, True), done.output
    assert ", which lack int8" in done.output
    (tmp_path / "other" / RISKS_FILE).write_bytes(b"")
    (tmp_path / "old").mkdir()
    with np.load(made / RISKS_FILE) as arrays:  # of a build that measured none for retrieval
        np.savez(tmp_path / "old" / RISKS_FILE, **{name: arrays[name] for name in arrays if "needles" not in name})
    for more, says in (
        (("--from", str(tmp_path)), f"from: {tmp_path / RISKS_FILE} does not exist"),
        (("--from", str(tmp_path / "other")), "holds no risks as this version writes them (No data left in file)"),
        (("--from", str(tmp_path / "old")), f"holds no risks as this version writes them ('needles.{LENGTH}"),
        (("--from", str(made), "--families", "int8"), "holds risks of bf16, expected some of int8"),
        (
            ("--from", str(made), "--families", "int8", "--dtype", "bfloat16"),
            "in float32, expected bfloat16, as the model is loaded; give",
        ),
        (("--from", str(made), "--lengths", "160"), f"holds risks at [{LENGTH}] tokens, expected [160]"),
        (("--from", str(made), "--data", __file__), "holds risks of other text, expected that of --data"),
    ):
        refused = CliRunner().invoke(app, [*words, "--budget", "1%", *more, "--output-dir", str(tmp_path / "none")])
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output
    trained = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        trained.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    trained.save_pretrained(model)
    refused = CliRunner().invoke(app, [*words, "--from", str(made), "--output-dir", str(tmp_path / "none")])
    assert (refused.exit_code, "holds risks of other weights" in refused.stderr) == (2, True), refused.output


def test_budgets_that_are_finished_stay_where_another_is_interrupted(
    model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, asked = tmp_path / "plans", calibration.decided, []

    def stops(measurement: Any, budget: float) -> Any:
        asked.append(budget)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(measurement, budget)

    monkeypatch.setattr(calibration, "decided", stops)
    both = ("--budget", "1%", "--budget", "1e-9", "--output-dir", str(out))
    stopped = run(model, material, *both)
    assert (stopped.exit_code, "with --resume" in stopped.stderr) == (130, True), stopped.output
    assert f"plan: {out}/1pct" in stopped.stdout
    first = files(out / "1pct")
    resumed = run(model, material, *both, "--resume", "--json")
    assert resumed.exit_code == BUDGET_NOT_MET, resumed.output
    assert f"kept: {out}/1pct" in resumed.stderr
    assert json.loads(resumed.stdout)["1pct"]["plan"] == json.loads(first["adaattn_plan.json"])
    assert asked == [math.log1p(0.01), 1e-9, 1e-9]
    assert files(out / "1pct") == first
    assert not (out / FILE).exists()


def test_a_proven_plan_stays_where_none_can_be_proven(planned: Path, material: tuple[str, str]) -> None:
    before = files(planned)
    done = run(planned, material, "--budget", "1e-9", "--json")
    assert done.exit_code == BUDGET_NOT_MET
    assert f"kept: the plan in {planned}, which was proven before" in done.stderr
    assert json.loads(done.stdout)["plan"]["layers"] == []
    after = files(planned)
    assert json.loads(after.pop("adaattn_failed.json"))["report"]
    assert after == before


def test_a_plan_that_was_not_proven_or_is_of_other_weights_does_not_stay(
    planned: Path, material: tuple[str, str]
) -> None:
    trained = AutoModelForCausalLM.from_pretrained(planned)
    with torch.no_grad():
        trained.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
    trained.save_pretrained(planned)
    done = run(planned, material, "--budget", "1e-9")
    assert (done.exit_code, "the plan is exact" in done.output) == (BUDGET_NOT_MET, True), done.output
    assert json.loads((planned / "adaattn_plan.json").read_text())["layers"] == []


def test_a_fine_tuned_checkpoint_that_carries_a_plan_is_calibrated_again(
    planned: Path, material: tuple[str, str], tmp_path: Path
) -> None:
    """Its plan would refuse the weights; losses are those beside the exact model in any case."""
    trained = AutoModelForCausalLM.from_pretrained(planned)
    assert trained.config.adaattn["plan"]
    with torch.no_grad():
        trained.model.layers[0].self_attn.k_proj.weight.mul_(1.01)
    again = tmp_path / "trained"
    shutil.copytree(planned, again, ignore=shutil.ignore_patterns("adaattn_*"))
    trained.save_pretrained(again)
    done = run(again, material, "--budget", "1%")
    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(again, attn_implementation="adaattn")
    adaattn_hf.load_plan(loaded)


def test_the_directory_of_another_model_is_refused_before_any_work(
    model: Path, material: tuple[str, str], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(demo_model_path("gpt2"), tmp_path / "other"))
    before = files(other)
    done = run(model, material, "--budget", "1%", "--output-dir", str(other))
    assert (done.exit_code, "of a model, whose config.json" in done.stderr) == (2, True), done.output
    for path in other.glob("*.safetensors"):
        path.unlink()
    done = run(model, material, "--budget", "1%", "--output-dir", str(other))
    assert (done.exit_code, "holds config.json of a model" in done.stderr) == (2, True), done.output
    assert files(other) == {name: data for name, data in before.items() if not name.endswith(".safetensors")}
    alone = tmp_path / "plan"
    for _ in range(2):  # into a new directory, and into one that a calibration wrote
        assert run(model, material, "--budget", "1%", "--output-dir", str(alone)).exit_code == 0


def test_a_model_is_not_changed_and_the_plan_goes_where_it_is_said_first(
    model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(model)
    words = [word for word in arguments(model, material) if word != "--in-place"]
    done = CliRunner().invoke(app, [*words, "--budget", "1%"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"the plan will be written to adaattn-plan; {model} is not changed\n")
    assert files(model) == before
    assert CliRunner().invoke(app, ["plan", "show"]).exit_code == 0  # finds it where it went
    assert CliRunner().invoke(app, ["plan", "explore", "--html", "page.html"]).exit_code == 0
    twice = CliRunner().invoke(app, ["plan", "show", "adaattn-plan", "--plan", "adaattn-plan"])
    assert (twice.exit_code, "expected one of them" in twice.stderr) == (2, True)
    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn")
    assert adaattn_hf.plan_of(loaded) is None
    adaattn_hf.load_plan(loaded, "adaattn-plan")

    # the plan of another model stays, and nothing is measured
    plan = files(tmp_path / "adaattn-plan")
    with torch.no_grad():
        loaded.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    adaattn_hf.remove_plan(loaded)
    loaded.save_pretrained(tmp_path / "tuned")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "tuned")
    for name, says in (("tuned", "a plan of model (other weights)"), ("half", "a plan of model (in float32)")):
        where, dtype = (model, ["--dtype", "bfloat16"]) if name == "half" else (tmp_path / name, [])
        rest = [word for word in arguments(where, material) if word != "--in-place"]
        refused = CliRunner().invoke(app, [*rest, "--budget", "1%", *dtype])
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output
        assert "give another directory (--output-dir), or delete adaattn-plan" in refused.stderr
        assert "moments" not in refused.output
        assert files(tmp_path / "adaattn-plan") == plan


def test_a_model_is_written_to_only_where_that_was_said(model: Path, material: tuple[str, str]) -> None:
    before = files(model)
    for words, says in (
        (
            ["--output-dir", str(model)],
            "is the model's own directory, expected one for the plan alone; give --in-place",
        ),
        (["--in-place", "--output-dir", "x"], "got --output-dir x, too, expected one of them"),
    ):
        rest = [word for word in arguments(model, material) if word != "--in-place"]
        done = CliRunner().invoke(app, [*rest, *words])
        assert (done.exit_code, says in done.stderr) == (2, True), done.output
    for named in ([], ["owner/name", "--data", material[0]]):
        done = CliRunner().invoke(app, ["calibrate", *named, "--in-place"])
        assert (done.exit_code, "expected the directory of a model that is yours" in done.stderr) == (2, True)
    assert files(model) == before
    written = run(model, material, "--budget", "1%")
    assert written.output.startswith(f"the plan will be written into the model {model}: its config.json")


@pytest.mark.parametrize("way", ["linked", "copied", "read-only", "link alone"])
def test_what_others_share_is_never_touched(model: Path, material: tuple[str, str], tmp_path: Path, way: str) -> None:
    """The hub's cache, with and without links, and files that are links or may not be written."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    if way in ("linked", "copied"):
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for file in model.iterdir():
            if way == "copied":  # as on a system without links
                shutil.copy(file, snapshot / file.name)
            else:
                shutil.copy(file, blobs / f"{file.name}.sha")
                (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{file.name}.sha"))
        target, says = snapshot, "lies in the cache of the hub"
    elif way == "read-only":
        (model / "config.json").chmod(0o444)
        target, says = model, "config.json is read-only"
    else:
        (model / "config.json").rename(tmp_path / "config.json")
        (model / "config.json").symlink_to(tmp_path / "config.json")
        target, says = model, "config.json is a link to"
    before = files(target)
    done = run(target, material, "--budget", "1%")
    assert (done.exit_code, says in done.stderr) == (2, True), done.output
    assert files(target) == before
    assert not any(blobs.glob("*plan*"))
    if way in ("linked", "copied"):
        beside = run(target, material, "--budget", "1%", "--output-dir", str(tmp_path / "plan"))
        assert beside.exit_code == 0, beside.output
        assert "\nowner/name: perplexity " in beside.output
        assert files(target) == before


def test_no_room_is_a_sentence_that_says_what_would_fit_and_what_is_kept(
    model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "plan")
    real, calls = fisher.measure, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:  # the second sequence, behind the needles of the first
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 "
                "GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. If reserved but"
            )
        return real(*args, **kwargs)

    monkeypatch.setattr(fisher, "measure", full)
    done = run(model, material, "--budget", "1%", "--output-dir", target)
    assert done.exit_code == 6, done.output
    assert "Traceback" not in done.output
    for words in (
        f"measuring risks on sequences of {LENGTH} tokens",
        "(CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which",
        "1.00 GiB is free)",
        f"shorter lengths (--lengths {LENGTH // 2})",
        "fewer rows (--rows 8)",
        f"are kept in {target}/{FILE}: the same command with --resume goes on",
    ):
        assert words in done.stderr, done.stderr
    resumed = run(model, material, "--budget", "1%", "--output-dir", target, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("where", "doing", "measured"),
    [
        ("calibration.layers.score_factors", f"reading the first sequence of {LENGTH} tokens", (3, 1)),
        ("calibration.measure.pricing.measure_prices", f"timing attention of 1 times {LENGTH} tokens", (0, 1)),
        ("calibration.search.compare_all", f"measuring whole plans on 3 sequences of {LENGTH} tokens", (0, 0)),
        ("calibration.verify.compare_all", f"proving a plan on sequences of {LENGTH} tokens", (0, 0)),
    ],
)
def test_no_room_in_any_phase_keeps_what_was_measured_before_it(
    model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, doing: str, measured: tuple[int, int],
) -> None:  # fmt: skip
    calls = counted(monkeypatch)
    table = price_table(LENGTH, {"exact": 1.0, "bf16": 0.5, "r16": 2.0, "r32": 2.0, "r48": 2.0})
    priced = Mock(return_value=table)
    monkeypatch.setattr(pricing, "measure_prices", priced)
    words = [word for word in arguments(model, material) if word not in ("--prices", material[1], "--in-place")]
    words[words.index("--families") + 1] = "bf16,rank"
    words += ["--budget", "1%", "--output-dir", str(tmp_path / "plan")]
    with monkeypatch.context() as planted:
        planted.setattr(f"adaattn_hf.{where}", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
        done = CliRunner().invoke(app, words)
    assert (done.exit_code, doing in done.stderr) == (6, True), done.output
    assert "what would fit: " in done.stderr
    kept = (tmp_path / "plan" / FILE).is_file()
    assert kept == ("--resume goes on" in done.stderr) == (measured[0] == 0), done.stderr
    calls.reset_mock()
    priced.reset_mock()
    resumed = CliRunner().invoke(app, [*words, "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert (calls.call_count, priced.call_count) == measured


def test_no_room_for_prices_or_weights_names_what_would_help(
    model: Path, material: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        return torch.empty(1 << 60)  # what torch raises on a CPU is a plain RuntimeError

    words = arguments(model, material)
    words = [w for w in words if w not in ("--prices", material[1], "--in-place")]
    with monkeypatch.context() as planted:
        planted.setattr(pricing, "measure_prices", full)
        done = CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path / "a"), "--batch-size", "8"])
    assert (done.exit_code, "a smaller batch (--batch-size 4)" in done.stderr) == (6, True), done.output
    with monkeypatch.context() as planted:
        planted.setattr(calibration, "whole_forward", Mock(side_effect=torch.OutOfMemoryError))
        done = run(model, material, "--budget", "1%")
    assert (done.exit_code, "sequences have no room" in done.output) == (0, True), done.output
    assert (model / "adaattn_plan.json").is_file()
    with monkeypatch.context() as planted:
        planted.setattr(AutoModelForCausalLM, "from_pretrained", full)
        done = CliRunner().invoke(app, [*words, "--output-dir", str(tmp_path / "b")])
    assert (done.exit_code, "loading the weights of" in done.stderr) == (6, True), done.output
    assert "nothing was finished before it" in done.stderr


def test_another_error_of_the_runtime_stays_what_it_is(
    model: Path, material: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("shapes disagree")

    monkeypatch.setattr(fisher, "measure", wrong)
    done = run(model, material, "--budget", "1%")
    assert isinstance(done.exception, RuntimeError)


@pytest.mark.parametrize(("dtype", "families"), [("float32", "window"), ("bfloat16", "bf16")])
def test_families_without_a_choice_are_refused_before_anything_is_measured(
    model: Path, material: tuple[str, str], dtype: str, families: str
) -> None:
    words = ["--lengths", "128", "--families", families, "--dtype", dtype]
    done = run(model, material, *words)
    assert (done.exit_code, "which offer no choice for 128 tokens in" in done.stderr) == (2, True), done.output
    assert "risk" not in done.stdout


def test_the_checkpoint_keeps_the_dtype_that_it_states(model: Path, material: tuple[str, str]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert run(model, material, "--budget", "1%", "--dtype", "float32").exit_code == 0
    assert json.loads((model / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_report_is_json_where_a_number_is_not_finite(
    model: Path, material: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that does not grow with the KL affords any KL, and a single cluster has no bound."""
    made = calibration.decided

    def calibrated(*arguments: Any, **options: Any) -> Any:
        result = made(*arguments, **options)
        result.report["history"].append({"afforded": [math.inf], "verified": {"upper": math.nan, "tries": 1}})
        return result

    monkeypatch.setattr(calibration, "decided", calibrated)
    run(model, material, "--budget", "1e-9")
    text = (model / "adaattn_report.json").read_text()
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["history"][-1] == {"afforded": [None], "verified": {"upper": None, "tries": 1}}


def test_ctrl_c_says_how_to_go_on_and_resume_gives_the_same_plan(
    planned: Path, material: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (planned / "adaattn_plan.json").read_bytes()
    real, calls = fisher.measure, []

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:  # the second sequence, behind the needles of the first
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(fisher, "measure", stops)
    stopped = run(planned, material, "--budget", "1%")
    assert stopped.exit_code == 130
    assert "with --resume" in stopped.stderr
    anew = run(planned, material, "--budget", "1%")
    assert anew.exit_code == 2
    assert "is an interrupted calibration; pass --resume" in anew.stderr
    assert (planned / FILE).is_file()
    resumed = run(planned, material, "--budget", "1%", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert len(calls) == 4
    assert (planned / "adaattn_plan.json").read_bytes() == whole
    assert not (planned / FILE).exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--lengths", "4x"), "lengths is '4x', expected numbers of tokens"),
        (("--lengths", "9k"), "lengths is [9216], expected at most the "),
        (("--data", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--dtype", "float33"), "Invalid value for '--dtype'"),
        (("--families", "windows"), "Did you mean 'window'"),
        (("--families", ","), "expected some of window,"),
        (("--threads", "0"), "threads is 0, expected at least 1"),
        (("--decode-tokens", "-1"), "decode_tokens is -1, expected at least 0"),
        (("--prices", "nowhere.json"), "nowhere.json is no file"),
        (("--output-dir", __file__), "cannot be made"),
        (("--budget", "lots"), "budget is 'lots'"),
        (("--budget", ""), "budget is '', expected a rise of the perplexity"),
        (("--budget", " "), "expected a rise of the perplexity"),
        (("--budget", "1%", "--budget", "0.1%"), "in_place: got 2 budgets, expected one"),
        (("--budget", "1%", "--budget", "1.0%"), "expected each once; leave the second 1.0% out"),
    ],
)
def test_wrong_arguments_end_with_code_2(
    model: Path, material: tuple[str, str], more: tuple[str, ...], words: str
) -> None:
    done = run(model, material, *more)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_polite_kill_keeps_what_is_finished_and_resume_gives_the_same_plan(
    model: Path, material: tuple[str, str]
) -> None:
    options = ("--budget", "1%", "--threads", "1")
    threads = torch.get_num_threads()
    try:
        assert run(model, material, *options).exit_code == 0
        whole = (model / "adaattn_plan.json").read_bytes()
        command = [sys.executable, "-P", "-c", "from adaattn_hf.cli.main import main; main()"]
        process = subprocess.Popen(
            [*command, *arguments(model, material), *options],
            stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None and not (model / FILE).is_file():
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
        assert process.returncode == 130, said
        assert "Loading weights" not in said  # no bars where nobody sees them grow
        assert f"finished work is kept in {model}; the same command with --resume goes on" in said
        assert (model / FILE).is_file()
        assert run(model, material, *options, "--resume").exit_code == 0
    finally:
        torch.set_num_threads(threads)
    assert (model / "adaattn_plan.json").read_bytes() == whole


def test_a_full_disk_is_a_sentence_and_loses_nothing(
    model: Path, material: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: CalibrationState, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory / FILE))

    monkeypatch.setattr(CalibrationState, "save", full)
    done = run(model, material, "--budget", "1%")
    assert done.exit_code == 3
    assert f"{FILE}: No space left on device; what is finished is kept, --resume goes on" in done.stderr
    assert "Traceback" not in done.output


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, material: tuple[str, str]) -> None:
    done = run(tmp_path, material)
    assert done.exit_code == 2
    assert "error: model:" in done.stderr
    absent = run(tmp_path / "none", material, "--output-dir", str(tmp_path))
    assert absent.exit_code == 2
    assert f"cannot load {str(tmp_path / 'none')!r}: there is no such directory" in absent.stderr


def test_lengths_may_be_written_in_thousands() -> None:
    assert tokens("4k, 8192") == (4096, 8192)


def test_bars_show_every_stage_and_the_time_left() -> None:
    settings = CalibrationSettings(lengths=(64, 128), sequences=2, rows=8, labels=1, held_out=4, tries=1)
    console = Console(force_terminal=True, width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with shown_progress(work_of(settings), console) as progress:
        for stage in progress.work:
            for step in range(3):
                progress(stage, step, 2)
        assert progress.share == pytest.approx(1.0)
    text = console.export_text()
    console.file.close()
    assert "in all" in text
    assert "verify 128" in text
    assert "0 s left" in text


def test_the_time_left_follows_the_work_done(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CalibrationSettings(lengths=(64,), sequences=2, rows=8, labels=1, held_out=4, tries=1)
    clock = [0.0]
    monkeypatch.setattr("adaattn_hf.eval.progress.time.monotonic", lambda: clock[0])
    progress = Display(work_of(settings), Console(quiet=True), None, quiet=True)
    assert progress.left() == ""
    for stage in ("moments", "risk"):
        progress(stage, 1, 1)
    share = (64 + 64 * 2 * 6) / sum(progress.work.values())
    assert progress.share == pytest.approx(share)
    clock[0] = 1000.0
    assert progress.left() == f"{1000 * (1 - share) / share / 60:.0f} min left"


def test_a_long_step_is_told_of_all_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ten seconds where there is no terminal; every few milliseconds here."""
    monkeypatch.setattr("adaattn_hf.eval.progress.EVERY", 0.005)
    settings = CalibrationSettings(lengths=(64,), sequences=2, rows=8, labels=1, held_out=4, tries=1)
    written = io.StringIO()
    with shown_progress(work_of(settings), Console(file=written)) as progress:
        progress("risk", 1, 2)
        limit = time.monotonic() + 20
        while written.getvalue().count("risk: 50 % after") < 2 and time.monotonic() < limit:
            time.sleep(0.005)
    after = written.getvalue()
    assert after.count("risk: 50 % after") >= 2
    time.sleep(0.05)
    assert written.getvalue() == after, "nothing is said when the work is over"


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}, 256),
    ],
)  # fmt: skip
def test_lengths_beyond_the_positions_are_refused_with_scaling_considered(
    model: Path, material: tuple[str, str], rope: dict[str, Any], reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 256
    config["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    (model / "config.json").write_text(json.dumps(config))

    def read(*arguments: Any, **options: Any) -> Any:
        raise OSError("the weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    done = run(model, material, "--lengths", str(reach + 32))
    assert done.exit_code == 2, done.output
    said = f"lengths is [{reach + 32}], expected at most the {reach} tokens that {model} has positions for"
    assert said in done.stderr
    assert f"--lengths {reach}" in done.stderr
    assert "the weights were read" not in done.stderr
    within = run(model, material, "--lengths", str(reach))
    assert "the weights were read" in within.stderr
