"""`adaattn calibrate` as a user meets it: exit codes, sentences, progress, Ctrl-C, what it leaves."""

import errno
import json
import math
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress as Bars
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

import adaattn_hf
from adaattn_cli.calibrate import BUDGET_NOT_MET, evaluation
from adaattn_cli.commands import CALIBRATE
from adaattn_cli.job import STAGES, Job, directory
from adaattn_hf._files import write_atomically
from adaattn_hf.calibration import calibrate as calibration
from adaattn_hf.calibration import fisher, inputs, layers, pricing
from adaattn_hf.calibration.inputs import seconds_at
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.state import FILE, RISKS_FILE
from adaattn_hf.eval import arms, team
from adaattn_hf.eval.demo import calibration_pages, demo_model_path
from adaattn_hf.eval.progress import Display, shown_progress
from adaattn_hf.plans.plan import PlanError
from adaattn_hf.policy.prices import Price, PriceTable

from ..support.calibration import price_table
from ..support.command import adaattn
from ..support.interrupting import failing, interrupted
from ..support.processor import ROUNDS_BF16

pytestmark = pytest.mark.usefixtures("few_rounds")
LENGTH = 96


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("material")
    text, prices = directory / "text.txt", directory / "prices.json"
    text.write_text("\n\n".join(calibration_pages()[:12]), encoding="utf-8")
    row = {"exact": Price(1e-4, 1.0), "bf16": Price(1e-4, 0.5)}
    prices.write_text(price_table(LENGTH, row).to_json())
    return str(text), str(prices)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_path("llama"), tmp_path / "model"))


PROOF = f"--lengths {LENGTH} --held-out 4"
SIZE = f"{PROOF} --sequences 2 --rows 16 --labels 1"
Run = Callable[..., Result]


def arguments(model: Path, text: str, *words: str) -> list[str]:
    return ["calibrate", str(model), "--data", text, "--families", "bf16", *" ".join(words).split()]


@pytest.fixture(scope="module")
def run(material: tuple[str, str]) -> Run:
    """The command on a model, as the tests' `adaattn`; the plan goes into the model unless `--output-dir` is given."""
    text, prices = material

    def calibrate(
        model: Path, *more: object, size: str = SIZE, place: str = "--in-place", priced: bool = True, **expected: Any
    ) -> Result:
        words = size, "" if "--output-dir" in more else place, f"--prices {prices}" * priced
        return adaattn(*arguments(model, text, *words), *more, **expected)

    return calibrate


@pytest.fixture(scope="module")
def first(run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A model that the command gave a plan, and what it said."""
    found = Path(shutil.copytree(demo_model_path("llama"), tmp_path_factory.mktemp("made") / "model"))
    return found, run(found, "--budget", "1%", "--json")


@pytest.fixture(scope="module")
def made(first: tuple[Path, Result]) -> Path:
    return first[0]


@pytest.fixture
def planned(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def test_a_plan_is_made_shown_stored_reloaded_and_refused_elsewhere(
    model: Path, run: Run, material: tuple[str, str]
) -> None:
    says = (
        "measuring risks: done after", "bf16: products in bfloat16", "perplexity ",
        ", allowed +1 % (95 %, held-out text) · whole model ", f"plan: {model}", "load_plan(model, ",
        f"adaattn eval {model} --plan {model} --data {material[0]}",
    )  # fmt: skip
    done = run(model, "--budget", "1%", says=says)
    assert ", \n" not in done.output
    assert done.output.count("held-out text)") == 1
    assert "nats" not in done.output.partition("allowed +1 %")[2]
    plan = (model / "adaattn_plan.json").read_bytes()
    done = run(model, "--budget", "1%", "--quiet")
    assert (model / "adaattn_plan.json").read_bytes() == plan
    shown = adaattn("plan", "show", str(model))
    line = next(one for one in done.output.splitlines() if one.startswith("model: perplexity "))
    assert line in shown.output
    assert "nats/token" not in shown.output
    verbose = adaattn("plan", "show", str(model), "--verbose")
    assert all(words in verbose.output for words in (line, "budget +1 %, 9.95e-3 nats/token", "passed: "))

    page = model / "pictures" / "plan.html"
    adaattn("plan", "show", str(model), "--html", str(page))
    assert all(words in page.read_text() for words in ("<title>model</title>", '"bf16"', r"\u0394nll", "whole model"))
    refused, words = f"{__file__}/plan.html", "test_calibrate_command.py cannot be made (Not a directory)"
    adaattn("plan", "show", str(model), "--html", refused, code=2, says=words)

    loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn")
    assert adaattn_hf.plan_of(adaattn_hf.load_plan(loaded)).to_json().encode() == plan
    inputs = torch.arange(64)[None]
    with torch.no_grad():
        planned = loaded(inputs).logits
        adaattn_hf.remove_plan(loaded)
        assert torch.equal(planned, loaded(inputs).logits) == (not ROUNDS_BF16), "the plan is one of bf16"
    half = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn", dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="calibrated in float32, the model is loaded in bfloat16"):
        adaattn_hf.load_plan(half)
    tuned = AutoModelForCausalLM.from_pretrained(model, attn_implementation="adaattn")
    with torch.no_grad():
        tuned.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
    with pytest.raises(PlanError, match="weights of layer 1 are not those"):
        adaattn_hf.load_plan(tuned)


def test_the_command_that_compares_a_plan_with_stock_attention_runs_as_it_is_printed(
    first: tuple[Path, Result], tmp_path: Path
) -> None:
    (line,) = (one for one in first[1].stderr.splitlines() if one.startswith("compare with stock attention: "))
    words = shlex.split(line.partition(": adaattn ")[2])
    adaattn(*words, "--limit-tokens", 256, "--output-dir", tmp_path / "eval")


def test_that_command_names_the_dtype_and_the_gguf_file() -> None:
    job = Job(
        model="m", data=(Path("t.txt"),), verify_data=None, target=Path("p"), settings=CalibrationSettings(),
        prices=None, options=CALIBRATE(gguf_file="a b.gguf", trust_remote_code=True),
    )  # fmt: skip
    known = "adaattn eval m --plan p --dtype bfloat16 --gguf-file 'a b.gguf' --trust-remote-code"
    assert evaluation(job, "bfloat16") == f"{known} --windows strided --data t.txt"


def test_json_is_all_that_standard_output_holds(first: tuple[Path, Result]) -> None:
    made, done = first
    told = json.loads(done.stdout)
    assert told["plan"] == json.loads((made / "adaattn_plan.json").read_text())
    assert told["report"]["table"]["choices"] == ["exact", "bf16"]
    assert ", at most " in done.stderr


def test_a_tokenizer_that_needs_a_package_is_a_sentence(
    model: Path, material: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Mock(side_effect=ImportError("Please install gguf>=0.10.0"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", absent)
    adaattn("calibrate", str(model), "--data", material[0], code=2, says="Please install gguf")


def test_text_that_is_named_twice_proves_nothing(model: Path, run: Run, material: tuple[str, str]) -> None:
    run(model, "--verify-data", material[0], code=2, says="expected each text once")
    assert not (model / "adaattn_plan.json").exists()


def test_processes_do_not_each_take_all_devices(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "join", lambda: team.Team(0, 2))
    run(model, "--device", "auto", code=2, says="device: got 'auto' in 2 processes, expected it in one")


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def trained(directory: Path, part: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.layers[0].get_submodule(part).weight.mul_(1.01)
    return model


def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    calls = Mock(side_effect=fisher.measure)
    monkeypatch.setattr(fisher, "measure", calls)
    return calls


def test_budgets_of_one_run_are_measured_once_and_make_the_plans_that_each_makes_alone(
    made: Path, model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    out = tmp_path / "plans"
    both = ("--budget", "1e-9", "--budget", "1%", "--output-dir", str(out))
    done = run(model, *both, "--json", code=BUDGET_NOT_MET)
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
    made: Path, model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "measure", Mock(side_effect=AssertionError("a risk pass ran")))
    out = tmp_path / "plan"

    def again(*words: object, to: str = "none", **expected: Any) -> None:
        """Sequences, rows and labels are those of the earlier run."""
        run(model, "--budget", "1%", *words, "--output-dir", tmp_path / to, size=PROOF, **expected)

    again("--from", made, to="plan", says=f"risks: those of {made / RISKS_FILE}\n")
    assert (out / "adaattn_plan.json").read_bytes() == (made / "adaattn_plan.json").read_bytes()
    dear = tmp_path / "dear.json"
    dear.write_text(price_table(LENGTH, {"exact": 1.0, "bf16": 2.0, "int8": 0.1}).to_json())
    words = ("--prices", dear, "--families", "bf16,int8", "--from", out / "adaattn_plan.json")  # risks travelled on
    again(*words, to="other", code=BUDGET_NOT_MET, says=("the budget saves time", ", which lack int8"))
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
        again(*more, code=2, says=says)
    trained(model, "mlp.up_proj").save_pretrained(model)
    again("--from", made, code=2, says="holds risks of other weights")


def test_budgets_that_are_finished_stay_where_another_is_interrupted(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "plans", failing(calibration.decided, 2, KeyboardInterrupt())
    monkeypatch.setattr(calibration, "decided", asked)
    both = ("--budget", "50%", "--budget", "1%", "--output-dir", str(out))  # the smaller comes first
    stopped = run(model, *both, code=130, says="with --resume")
    assert f"plan: {out}/1pct" in stopped.stdout
    first = files(out / "1pct")
    says = (f"kept: {out}/1pct", ", proven for +1 %: ")
    resumed = run(model, *both, "--resume", "--json", says=says)
    assert json.loads(resumed.stdout)["1pct"]["plan"] == json.loads(first["adaattn_plan.json"])
    assert [budget for (_, budget, _), _ in asked.call_args_list] == [math.log1p(share) for share in (0.01, 0.5, 0.5)]
    assert files(out / "1pct") == first
    assert not (out / FILE).exists()


def test_a_proven_plan_stays_where_none_can_be_proven(planned: Path, run: Run) -> None:
    before = files(planned)
    done = run(planned, "--budget", "1e-9", "--json", code=BUDGET_NOT_MET)
    assert f"kept: the plan in {planned}, which was verified before" in done.stderr
    assert json.loads(done.stdout)["plan"]["layers"] == []
    after = files(planned)
    assert json.loads(after.pop("adaattn_failed.json"))["report"]
    assert after == before


def test_a_plan_that_was_not_proven_or_is_of_other_weights_does_not_stay(planned: Path, run: Run) -> None:
    trained(planned, "self_attn.k_proj").save_pretrained(planned)
    run(planned, "--budget", "1e-9", code=BUDGET_NOT_MET, says="the plan is exact")
    assert json.loads((planned / "adaattn_plan.json").read_text())["layers"] == []


def test_a_fine_tuned_checkpoint_that_carries_a_plan_is_calibrated_again(
    planned: Path, run: Run, tmp_path: Path
) -> None:
    """Its plan would refuse the weights; losses are those beside the exact model in any case."""
    tuned, again = trained(planned, "self_attn.k_proj"), tmp_path / "trained"
    assert tuned.config.adaattn["plan"]
    shutil.copytree(planned, again, ignore=shutil.ignore_patterns("adaattn_*"))
    tuned.save_pretrained(again)
    run(again, "--budget", "1%")
    loaded = AutoModelForCausalLM.from_pretrained(again, attn_implementation="adaattn")
    adaattn_hf.load_plan(loaded)


def test_the_directory_of_another_model_is_refused_before_any_work(
    model: Path, made: Path, run: Run, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(demo_model_path("gpt2"), tmp_path / "other"))
    before = files(other)
    run(model, "--budget", "1%", "--output-dir", str(other), code=2, says="of a model, whose config.json")
    for path in other.glob("*.safetensors"):
        path.unlink()
    run(model, "--budget", "1%", "--output-dir", str(other), code=2, says="holds config.json of a model")
    assert files(other) == {name: data for name, data in before.items() if not name.endswith(".safetensors")}
    alone = tmp_path / "plan"  # one that a calibration wrote is none of a model
    alone.mkdir()
    for path in (*made.glob("adaattn_*"), made / "config.json"):
        shutil.copy(path, alone)
    run(model, "--budget", "1%", "--output-dir", str(alone))


def test_a_model_is_not_changed_and_the_plan_goes_where_it_is_said_first(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(model)
    done = run(model, "--budget", "1%", place="")
    assert done.output.startswith(
        f"the plan will be written to adaattn-plan; {model} is not changed\nbudget: perplexity +1 %"
    )
    assert files(model) == before
    assert adaattn("plan", "show").exit_code == 0  # finds it where it went
    adaattn("plan", "explore", "--html", "page.html")
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
        remedy = "give another directory (--output-dir), or delete adaattn-plan"
        refused = run(where, "--budget", "1%", *dtype, place="", code=2, says=(says, remedy))
        assert "moments" not in refused.output
        assert files(tmp_path / "adaattn-plan") == plan
    read = Mock(side_effect=AssertionError("the weights were read"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    says = f"a plan of model; {demo_model_path('gpt2').name} is another model (model type llama there, gpt2 here)"
    refused = run(demo_model_path("gpt2"), "--budget", "1%", place="", code=2, says=says)
    assert "will be written" not in refused.output
    assert directory(CALIBRATE()) == Path("adaattn-plan-demo"), "that of the packaged model is out of the way"


def test_a_model_is_written_to_only_where_that_was_said(
    model: Path, first: tuple[Path, Result], run: Run, material: tuple[str, str]
) -> None:
    before = files(model)
    for words, says in (
        (f"--output-dir {model}", "is the model's own directory, expected one for the plan alone; give --in-place"),
        ("--in-place --output-dir x", "got --output-dir x, too, expected one of them"),
    ):
        run(model, place=words, code=2, says=says)
    for named in ([], ["owner/name", "--data", material[0]]):
        adaattn("calibrate", *named, "--in-place", code=2, says="expected the directory of a model that is yours")
    assert files(model) == before
    made, done = first
    assert done.stderr.startswith(f"the plan will be written into the model {made}: its config.json")


@pytest.mark.parametrize("way", ["linked", "copied", "read-only", "link alone"])
def test_what_others_share_is_never_touched(model: Path, run: Run, tmp_path: Path, way: str) -> None:
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
    run(target, "--budget", "1%", code=2, says=says)
    assert files(target) == before
    assert not any(blobs.glob("*plan*"))
    if way == "linked":
        run(target, "--budget", "1%", "--output-dir", str(tmp_path / "plan"), says="\nowner/name: perplexity ")
        assert files(target) == before


def test_no_room_is_a_sentence_that_says_what_would_fit_and_what_is_kept(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "plan")
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 "
        "GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. If reserved but"
    )
    calls = failing(fisher.measure, 3, error)  # the second sequence, after the needles of the first
    monkeypatch.setattr(fisher, "measure", calls)
    says = (
        f"measuring risks on sequences of {LENGTH} tokens",
        "(CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which",
        "1.00 GiB is free)", f"shorter lengths (--lengths {LENGTH // 2})", "fewer rows (--rows 8)",
        f"what was measured before is kept in {target}/{FILE}: the same command with --resume goes on",
    )  # fmt: skip
    run(model, "--budget", "1%", "--output-dir", target, code=6, says=says)
    run(model, "--budget", "1%", "--output-dir", target, "--resume")
    assert calls.call_count == 4


@pytest.mark.parametrize(("where", "doing", "measured"), [
    ("calibration.measure.forecast", f"reading the first sequence of {LENGTH} tokens", (3, 1)),
    ("calibration.measure.pricing.measure_prices", f"timing attention of 1 times {LENGTH} tokens", (0, 1)),
    ("calibration.search.joint", f"measuring whole plans on 3 sequences of {LENGTH} tokens", (0, 0)),
    ("calibration.proof.stored_tap", f"verifying a plan on sequences of {LENGTH} tokens", (0, 0)),
])  # fmt: skip
def test_no_room_in_any_phase_keeps_what_was_measured_before_it(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, doing: str, measured: tuple[int, int],
) -> None:  # fmt: skip
    calls = counted(monkeypatch)
    table = price_table(LENGTH, {"exact": 1.0, "bf16": 0.5, "r16": 2.0, "r32": 2.0, "r48": 2.0})
    priced = Mock(return_value=table)
    monkeypatch.setattr(pricing, "measure_prices", priced)
    words = ("--families", "bf16,rank", "--budget", "1%", "--output-dir", tmp_path / "plan")
    with monkeypatch.context() as planted:
        planted.setattr(f"adaattn_hf.{where}", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
        done = run(model, *words, priced=False, code=6, says=(doing, "what would fit: "))
    kept = f"kept in {tmp_path / 'plan' / FILE}: the same command with --resume goes on"
    assert ("nothing was finished before it" if measured[0] else kept) in done.stderr
    calls.reset_mock()
    priced.reset_mock()
    run(model, *words, "--resume", priced=False)
    assert (calls.call_count, priced.call_count) == measured


def test_no_room_is_told_by_the_stage_that_had_none() -> None:
    job = Job("m", (Path("t.txt"),), None, Path("p"), CalibrationSettings(), None, CALIBRATE(), {})
    said = {stage: job.out_of_memory("cpu", stage, "full") for stage in ("", *STAGES, "verify 4096")}
    assert [stage for stage, words in said.items() if "verifying a plan" in words] == ["plans", "verify 4096"]


def test_no_room_for_prices_or_weights_names_what_would_help(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        return torch.empty(1 << 60)  # what torch raises on a CPU is a plain RuntimeError

    with monkeypatch.context() as planted:
        planted.setattr(pricing, "measure_prices", full)
        words = ("--output-dir", tmp_path / "a", "--batch-size", 8)
        run(model, *words, priced=False, code=6, says="a smaller batch (--batch-size 4)")
    with monkeypatch.context() as planted:
        planted.setattr(calibration, "whole_passes", Mock(side_effect=torch.OutOfMemoryError))
        run(model, "--budget", "1%", says="sequences have no room")
    assert (model / "adaattn_plan.json").is_file()
    with monkeypatch.context() as planted:
        planted.setattr(AutoModelForCausalLM, "from_pretrained", full)
        said = ("loading the weights of", "nothing was finished before it")
        run(model, "--output-dir", tmp_path / "b", priced=False, code=6, says=said)


def test_another_error_of_the_runtime_stays_what_it_is(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher, "measure", Mock(side_effect=RuntimeError("shapes disagree")))
    assert isinstance(run(model, "--budget", "1%", code=1).exception, RuntimeError)


def test_the_checkpoint_keeps_the_dtype_that_it_states(model: Path, run: Run) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run(model, "--budget", "1%", "--dtype", "float32")
    assert json.loads((model / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_budget_that_cannot_be_met_has_a_code_a_sentence_and_a_report_of_json(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers may not be finite: a loss that does not grow with the KL affords any; one cluster has no bound."""
    made = calibration.decided

    def calibrated(*arguments: Any, **options: Any) -> Any:
        result = made(*arguments, **options)
        result.report["history"].append({"afforded": [math.inf], "verified": {"upper": math.nan, "tries": 1}})
        return result

    monkeypatch.setattr(calibration, "decided", calibrated)
    says = ("the budget of +1.0e-7 % cannot be met", "the plan is exact")
    done = run(model, "--budget", "1e-9", code=BUDGET_NOT_MET, says=says)
    assert "load_plan" not in done.output
    assert json.loads((model / "adaattn_plan.json").read_text())["layers"] == []
    text = (model / "adaattn_report.json").read_text()
    report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["history"][-1] == {"afforded": [None], "verified": {"upper": None, "tries": 1}}


@pytest.mark.parametrize(("more", "words"), [
    (("--lengths", "4x"), "lengths is '4x', expected numbers of tokens"),
    (("--lengths", "9k"), "lengths is [9216], expected at most the "),
    (("--data", "nowhere.txt"), "nowhere.txt does not exist"), (("--lengths", "9" * 5000), "9, expected numbers"),
    (("--dtype", "float33"), "Invalid value for '--dtype'"),
    (("--families", "windows"), "Did you mean 'window'"), (("--families", ","), "expected some of window,"),
    (("--lengths", "128", "--families", "window", "--dtype", "float32"), "offer no choice for 128 tokens in"),
    (("--lengths", "128", "--families", "bf16", "--dtype", "bfloat16"), "offer no choice for 128 tokens in"),
    (("--threads", "0"), "threads is 0, expected from 1 to"),
    (("--aim", "speed"), "Invalid value for '--aim'"),
    (("--aim", "step"), "families is bf16, expected window among them"),
    (("--kv-bytes", "0.4x"), "kv_bytes is 0.4, expected none beside the aim 'prompt'"),
    (("--prices", "nowhere.json"), "nowhere.json is no file"),
    (("--output-dir", __file__), "cannot be made"), (("--budget", "lots"), "budget is 'lots'"),
    (("--budget", ""), "budget is '', expected a rise of the perplexity"),
    (("--budget", " "), "expected a rise of the perplexity"),
    (("--budget", "1%", "--budget", "0.1%"), "in_place: got 2 budgets, expected one"),
    (("--budget", "1%", "--budget", "1.0%"), "expected each once; leave the second 1.0% out"),
])  # fmt: skip
def test_wrong_arguments_end_with_code_2_before_anything_is_measured(
    model: Path, run: Run, more: tuple[str, ...], words: str
) -> None:
    assert "risk" not in run(model, *more, code=2, says=words).stdout


def test_a_polite_kill_keeps_what_is_finished_and_resume_gives_the_same_plan(
    model: Path, made: Path, run: Run, material: tuple[str, str]
) -> None:
    """A process of its own gets the signal."""
    words = arguments(model, material[0], SIZE, "--in-place --budget 1% --threads 1 --prices", material[1])
    process = interrupted(words, model / FILE, stop=signal.SIGTERM)
    assert process.returncode == 143, process.stderr
    assert f"what is measured is kept in {model}; the same command with --resume goes on" in process.stderr
    assert (model / FILE).is_file()
    run(model, "--budget", "1%", "--resume")
    assert (model / "adaattn_plan.json").read_bytes() == (made / "adaattn_plan.json").read_bytes()


def test_a_full_disk_is_a_sentence_and_loses_nothing(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(model / FILE))
    monkeypatch.setattr("adaattn_hf.calibration.state.write_atomically", failing(write_atomically, 2, full))
    says = (
        f"{FILE}: No space left on device; what is measured is kept in {model}; the same command with --resume goes on"
    )
    run(model, "--budget", "1%", code=3, says=says)
    run(model, "--budget", "1%", "--resume")


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, run: Run) -> None:
    run(tmp_path, code=2, says="error: model:")
    absent = tmp_path / "none"
    says = f"cannot load {str(absent)!r}: there is no such directory"
    run(absent, "--output-dir", tmp_path, code=2, says=says)


def test_bars_show_every_stage() -> None:
    console = Console(force_terminal=True, width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with shown_progress(console) as progress:
        for stage in ("moments", "risk", "verify 128"):
            for step in range(3):
                progress(stage, step, 2)
    text = console.export_text()
    console.file.close()
    assert all(stage in text for stage in ("moments", "risk", "verify 128"))
    bars = Bars(console=Console(quiet=True))
    progress = Display(bars.console, bars, quiet=False)
    for step in (0, 2, 0, 1):  # the second candidate is under way
        progress("verify 128", step, 2)
    assert not bars.finished


def test_the_time_left_is_that_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("adaattn_hf.eval.progress.time.monotonic", lambda: clock[0])
    progress = Display(Console(quiet=True), None, quiet=True)
    assert progress.line() == "beginning: 0 % after 0 s"
    clock[0] = 100.0
    progress("risk", 2, 4)  # an interrupted run did these
    clock[0] = 160.0
    assert progress.line() == "risk: 50 % after 160 s"
    progress("risk", 3, 4)
    assert progress.line() == "risk: 75 % after 160 s, 60 s left"
    progress("risk", 4, 4)
    assert progress.line() == "risk: done after 160 s"
    progress("verify 128", 0, 2)
    clock[0] = 400.0
    progress("verify 128", 1, 2)
    assert progress.line() == "verify 128: 50 % after 400 s, 4 min left"
    progress("verify 128", 0, 2)  # of the next candidate
    assert progress.line() == "verify 128: 0 % after 400 s"


@pytest.mark.parametrize("cost", [
    lambda n: 1e-3 * n, lambda n: 1e-4 * n + 1e-6 * n**2, lambda n: 0.5, lambda n: 1e-4 * n + 0.2,
    lambda n: max(0.3, 5e-5 * n),  # a GPU waits for the host on short ones
])  # fmt: skip
def test_long_sequences_are_foretold_by_short_ones(
    cost: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, clock = list[int](), [0.0]

    def steps(tokens: int) -> dict[str, Callable[[], None]]:
        def run() -> None:
            asked.append(tokens)
            clock[0] += cost(tokens) + 60.0 * (len(asked) == 1)  # to read weights

        return {"pair": run, "none": lambda: None}

    monkeypatch.setattr("adaattn_hf.stats.stopwatch.time.perf_counter", lambda: clock[0])
    found = seconds_at((4096, 16384), torch.device("cpu"), steps)
    for length, seconds in found["pair"].items():
        assert seconds == pytest.approx(cost(length), rel=0.01 if length == 16384 else 0.4)
    assert set(found["none"].values()) == {0.0}
    assert max(asked) <= 4096 or cost(max(asked) // 2) < 1.0, "the longest sequences are run where they are brief"


def test_before_anything_is_measured_it_is_said_how_long_it_takes_what_shortens_it_and_what_is_kept() -> None:
    budgets = {Path("p/1pct"): 0.01, Path("p/2pct"): 0.02}
    job = Job("m", (Path("t.txt"),), None, Path("p"), CalibrationSettings(minutes=5.0), None, CALIBRATE(), budgets)
    stages = {"moments": 10.0, "risk": 600.0, "prices": 0.0, "plans": 295.0}
    assert job.outlook(stages) == [
        "time: about 20 min in all (measuring risks 10 min, finding and verifying plans 10 min); shorter with "
        "--lengths 2048, --sequences 2 or --minutes N",
        "--minutes 5 will end it before that, perhaps without a plan",
        "Ctrl-C keeps what is measured by then in p, and --resume goes on with it",
    ]
    again = replace(job, options=CALIBRATE(resume=True)).outlook(stages)[0]
    assert again.startswith("time: about 20 min from the beginning, less what is kept (measuring risks 10 min, ")


def test_what_is_foretold_is_told_before_the_first_pass(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "decided", Mock(side_effect=KeyboardInterrupt))
    size = SIZE.replace(f"--lengths {LENGTH}", "--lengths 288")
    said = run(model, "--output-dir", tmp_path / "plan", size=size, priced=False, code=130).output
    told, kept = said.index("time: about "), said.index(f"Ctrl-C keeps what is measured by then in {tmp_path}")
    assert told < kept < said.index("reading each layer: done")


def test_risks_are_kept_as_they_are_measured_and_said_to_be_kept_only_then(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, size = tmp_path / "plan", SIZE.replace(f"--lengths {LENGTH}", f"--lengths 48,{LENGTH}")
    row = {"exact": Price(0.0, 1.0), "bf16": Price(0.0, 2.0)}
    dear = PriceTable("no plan pays", {}, {phase: {48: row, LENGTH: row} for phase in pricing.PHASES})
    monkeypatch.setattr(pricing, "measure_prices", lambda *_, **__: dear)

    def go(*more: object, to: Path = plan, code: int = BUDGET_NOT_MET, says: str = "") -> None:
        run(model, *more, "--output-dir", to, size=size, priced=False, code=code, says=says)

    with monkeypatch.context() as planted:
        planted.setattr(layers, "layer_of", Mock(side_effect=KeyboardInterrupt))
        go(code=130, says="nothing was measured yet, so nothing is kept")
    assert not plan.exists()
    with monkeypatch.context() as planted:
        planted.setattr(fisher, "measure", failing(fisher.measure, 3, KeyboardInterrupt()))
        go(code=130, says=f"what is measured is kept in {plan}; the same command with --resume goes on")
    go(code=2, says="is an interrupted calibration; pass --resume")
    go("--seed", "1", "--resume", code=2, says="belongs to another model, text or settings")
    go("--resume")
    assert not list(plan.glob("*partial*"))
    go(to=tmp_path / "whole")
    with np.load(plan / RISKS_FILE) as resumed, np.load(tmp_path / "whole" / RISKS_FILE) as whole:
        for name in (f"{part}.{length}" for part in ("total", "dropped") for length in (48, LENGTH)):
            assert np.array_equal(resumed[name], whole[name])
    (plan / FILE).write_bytes(b"no state")
    go("--resume", code=2, says="is no whole state of a calibration; delete it")


def test_minutes_bound_the_whole_and_keep_what_is_measured(
    model: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(real: Callable[..., Any], at: int) -> Mock:
        return failing(real, at, lambda: monkeypatch.setattr(inputs.Inputs, "left", 0.0))

    words = ("--budget", "1%", "--minutes", "30", "--output-dir", tmp_path / "plan")
    left = inputs.Inputs.left
    monkeypatch.setattr(inputs.Inputs, "left", 0.0)
    run(model, *words, code=4, says="30 minutes are over: nothing was measured yet, so nothing is kept")
    monkeypatch.setattr(inputs.Inputs, "left", left)
    monkeypatch.setattr(fisher, "measure", late(fisher.measure, 1))
    run(model, *words, code=4, says=f"30 minutes are over: what is measured is kept in {tmp_path / 'plan'}; --resume")
    monkeypatch.setattr(inputs.Inputs, "left", left)
    monkeypatch.setattr(inputs, "compare", late(arms.compare, 1))
    done = run(model, *words, "--resume", code=BUDGET_NOT_MET, says="30 minutes are over; the plan is exact")
    assert "verify" not in done.output


@pytest.mark.parametrize(("rope", "reach"), [
    ({"rope_type": "default"}, 256),
    ({"rope_type": "linear", "factor": 4.0}, 1024),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0}, 256),
])  # fmt: skip
def test_lengths_beyond_the_positions_are_refused_with_scaling_considered(
    model: Path, run: Run, rope: dict[str, Any], reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 256
    config["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    (model / "config.json").write_text(json.dumps(config))
    read = Mock(side_effect=OSError("the weights were read"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    done = run(model, "--lengths", str(reach + 32), code=2)
    said = f"lengths is [{reach + 32}], expected at most the {reach} tokens that {model} has positions for"
    assert said in done.stderr
    assert f"--lengths {reach}" in done.stderr
    assert "the weights were read" not in done.stderr
    run(model, "--lengths", reach, code=2, says="the weights were read")
