"""`adaattn eval` and `adaattn explain` as a user meets them: arguments, files, exit codes, messages."""

import errno
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from typer.testing import Result

from adaattn_hf.errors import EvalError, UsageError, unknown
from adaattn_hf.eval import journal, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches.checkpoint import resolve_dtype

from ..support.command import adaattn
from ..support.interrupting import failing
from ..support.warm import WarmInterpreter

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def evaluate(*arguments: object, **expected: Any) -> Result:
    return adaattn("eval", *arguments, "--attn-implementation", "eager", **expected)


def report_of(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name / runner.REPORT).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_two_corpora_make_two_reports_and_one_page(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--data", f"lambada:{texts / 'passages.jsonl'}")
    result = adaattn("eval", llama, *data, "--batch-size", 2, "--output-dir", tmp_path, "--anchor", "eager")
    pages, lastword = report_of(tmp_path, "wikitext"), report_of(tmp_path, "lambada")
    assert [a["implementation"] for a in pages["quality"]["arms"]] == ["sdpa", "adaattn", "eager"]
    assert abs(pages["quality"]["comparisons"][0]["perplexity_ratio"]["value"] - 1) < 1e-5
    assert (pages["activation"][1]["rate"], lastword["quality"]["arms"][0]["items"]) == (0.0, 6)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## tiny-llama on wikitext (3 documents), float32" in page
    assert "## tiny-llama on lambada (6 documents), float32" in page
    assert f"{pages['quality']['arms'][1]['word_perplexity']:.4g}" in page  # of a model that never learned: beyond 1e6
    assert "adaattn (tested)" in result.output


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_other_families(request: pytest.FixtureRequest, kind: str, texts: Path, tmp_path: Path) -> None:
    directory = request.getfixturevalue(kind)
    data = ("--data", texts / "plain.txt", "--limit-tokens", 60, "--mask-fraction", 0.5)
    result = adaattn("eval", directory, *data, "--output-dir", tmp_path, "--quiet")
    report = report_of(tmp_path, "plain")
    assert report["model"]["objective"] == ("masked" if kind == "bert" else "causal")
    assert report["quality"]["arms"][0]["word_perplexity"] is None  # the text was cut: words are not counted
    assert "sdpa" not in result.output  # quiet


def test_bounds_decide_the_exit_code(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--limit-docs", 2)
    kept = evaluate(llama, *data, "--max-ppl-ratio", 1.01, "--output-dir", tmp_path / "a", "--json")
    assert json.loads(kept.stdout) == report_of(tmp_path / "a", "wikitext")
    assert [bound["kept"] for bound in report_of(tmp_path / "a", "wikitext")["bounds"]] == [True]
    evaluate(llama, *data, "--max-ppl-ratio", 0.5, "--output-dir", tmp_path / "b", code=1, says="max_ppl_ratio 0.5")
    assert "above it" in (tmp_path / "b" / "report.md").read_text(encoding="utf-8")
    (tmp_path / "short.txt").write_text("the lamp", encoding="utf-8")
    one_window = ("--data", tmp_path / "short.txt", "--max-ppl-ratio", 1.0, "--output-dir", tmp_path / "c")
    evaluate(llama, *one_window, code=1, says="no interval")


def test_json_holds_the_reports_of_this_run_alone(llama: Path, texts: Path, tmp_path: Path) -> None:
    output = ("--limit-tokens", 40, "--output-dir", tmp_path, "--json")
    evaluate(llama, "--data", texts / "plain.txt", *output)
    other = evaluate(llama, "--data", f"wikitext:{texts / 'pages.txt'}", *output)
    assert json.loads(other.stdout) == report_of(tmp_path, "wikitext")


def test_a_bad_place_is_told_first(llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").touch()
    monkeypatch.delattr(tf.AutoModelForCausalLM, "from_pretrained")
    for words in ((llama, "--data", texts / "plain.txt"), ()):
        evaluate(*words, code=2, says=("output_dir: results/eval/", "give a directory that can be written"))


def test_what_a_polite_kill_interrupts_can_go_on(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (llama, "--data", f"wikitext:{texts / 'pages.txt'}", "--context", 16, "--output-dir", tmp_path)
    before, killed = signal.getsignal(signal.SIGTERM), lambda: signal.raise_signal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", failing(runner.forward, 9, killed))
        evaluate(*arguments, code=143, says=f"--resume --output-dir {tmp_path}")
    assert signal.getsignal(signal.SIGTERM) is before
    assert len((tmp_path / "wikitext" / "journal.jsonl").read_bytes().splitlines()) > 1
    evaluate(*arguments, code=5)
    evaluate(*arguments, "--resume")
    assert report_of(tmp_path, "wikitext")["quality"]["arms"][0]["tokens"] > 100


@pytest.mark.parametrize(("arguments", "code", "says"), [
    (("--data", "{pages}", "--attn-implementation", "adaatn"), 4, "Did you mean 'adaattn'"),
    (("--data", "{pages}", "--dtype", "fp8"), 2, "Invalid value for '--dtype'"),
    (("--data", "{pages}", "--windows", "stridden"), 2, "Invalid value for '--windows'"),
    (("--data", "{pages}", "--padding", "top"), 2, "Invalid value for '--padding'"),
    (("--data", "{pages}", "--context", "900"), 2, "at most the 64 tokens"),
    (("--data", "{pages}", "--context", "16", "--stride", "17"), 2, "leave tokens out"),
    (("--data", "{pages}", "--batch-size", "0"), 2, "batch_size: got 0"),
    (("--data", "{pages}", "--mask-fraction", "2"), 2, "mask_fraction: got 2"),
    (("--data", "{pages}", "--prefix-token", "99999"), 2, "gives the token 99999"),
    (("--data", "{pages}", "--seed", "-1"), 2, "seed: got -1"),
    (("--data", "{pages}", "--threads", "0"), 2, "threads is 0, expected from 1 to"),
    (("--data", "{pages}", "--threads", str(10**21)), 2, "expected from 1 to"),
    (("--data", "{pages}", "--prefix-token", str(10**21)), 2, "expected the number of a token"),
    (("--data", "{pages}", "--max-ppl-ratio", "nan"), 2, "max_ppl_ratio: got nan, expected a ratio"),
    (("--data", "{pages}", "--output-dir", f"{__file__}/out"), 2, "cannot be made"),
    (("--data", "{pages}", "--resume"), 2, "no --output-dir"),
    (("--data", "{pages}", "--data", "{pages}"), 2, "different names"),
    (("--data", "{pages}", "--objective", "seq2seq"), 2, "Invalid value for '--objective'"),
    (("--data", "{passages}", "--limit-tokens", "9"), 2, "--limit-docs"),
    (("--data", "{passages}", "--limit-tokens", "9", "--tokenizer", "/nowhere"), 2, "--limit-docs"),
    (("--data", "nowhere.txt"), 3, "no file or directory here"),
    (("--data", "{pages}", "--tokenizer", "/nowhere"), 4, "tokenizer: cannot load"),
    (("--data", "{pages}", "--no-such-option",), 2, "No such option"),
])  # fmt: skip
def test_wrong_arguments(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"pages": f"wikitext:{texts / 'pages.txt'}", "passages": f"lambada:{texts / 'passages.jsonl'}"}
    adaattn("eval", llama, *(a.format(**names) for a in arguments), code=code, says=says)
    assert not list(tmp_path.rglob("report.json"))


def test_reports_stay_in_their_place(llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a directory named after its text, whatever way the text is named."""
    shutil.copytree(texts, tmp_path / "texts")
    (tmp_path / "texts" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "texts" / "below")
    evaluate(llama, "--data", "..", "--limit-tokens", 40, "--output-dir", tmp_path / "out", "--quiet")
    assert report_of(tmp_path / "out", "texts")["data"]["origin"] == "texts"
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("command", ["eval", "profile"])
def test_text_that_is_not_there_is_told_before_the_hub_is_asked(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tf.AutoConfig, "from_pretrained")
    adaattn(command, "somebody/something", "--data", "nowhere.txt", code=3, says="nowhere.txt")


def test_models_that_cannot_be_had(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--output-dir", tmp_path / "out")
    evaluate(tmp_path / "nothing", *data[2:], code=4, says=("cannot load", "there is no such directory"))
    tf.AutoModel.from_config(tf.AutoConfig.from_pretrained(llama)).save_pretrained(tmp_path / "headless")
    tf.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "headless")
    evaluate(tmp_path / "headless", *data, code=4, says="language-model head")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.Q4.gguf").touch()
    evaluate(tmp_path / "folder", *data, code=4, says="--gguf-file model.Q4.gguf")
    evaluate(tmp_path / "headless", *data, "--objective", "causal", code=4, says="would be random")
    adaattn("eval", llama, *data, "--attn-implementation", "adaattn_fa2", "--device", "cpu", code=4, says="flash-attn")


def test_rolling_needs_a_prefix(llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the weights are read."""
    tokenizer = tf.AutoTokenizer.from_pretrained(llama)
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = ("--data", texts / "plain.txt", "--tokenizer", tmp_path / "tokenizer", "--output-dir")
    with monkeypatch.context() as without:
        without.delattr(tf.AutoModelForCausalLM, "from_pretrained")
        evaluate(llama, *data, tmp_path / "rolling", code=2, says="--prefix-token")
    evaluate(llama, *data, tmp_path / "rolling", "--prefix-token", 1)
    evaluate(llama, *data, tmp_path / "strided", "--windows", "strided")


def test_help_states_the_exit_codes() -> None:
    shown = " ".join(adaattn("eval", "--help").output.split())
    for code in {0, 1, 130, 143, *(one.exit_code for one in EvalError.__subclasses__())}:
        assert f"{code} " in shown
    assert "3 no data" in shown
    adaattn("evl", code=2, says="eval")


def test_explain_reads_the_configuration_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    result = adaattn("explain", tmp_path, "--device", "cpu", "--verbose", says="prefill")
    assert "flash-attn is not installed" in result.output or "flash-attn's kernels run on CUDA" in result.output


@pytest.mark.parametrize(("arguments", "code", "says"), [
    (("{llama}", "--attn-implementation", "sdpa"), 2, "attn_implementation: got 'sdpa'"),
    (("{llama}", "--attn-implementation", "adaattn_fa2", "--device", "cpu"), 4, "cannot explain"),
    (("/nowhere",), 4, "there is no such directory"),
    (("{llama}", "--dtype", "int4"), 2, "Invalid value for '--dtype'"),
])  # fmt: skip
def test_explain_refuses(llama: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    adaattn("explain", *(a.format(llama=llama) for a in arguments), code=code, says=says)


@pytest.mark.parametrize("command", ["eval", "explain", "profile"])
def test_a_misspelt_directory_names_the_right_one(command: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama.parent)
    adaattn(command, f"{llama.name}a", code=4, says=f"no directory {llama.name}a; did you mean {llama.name}?")
    assert not Path("results").exists(), "a failed command leaves nothing"


def test_programs_hear_of_unknown_words_as_well() -> None:
    """The command line completes and checks them before."""
    with pytest.raises(UsageError, match=r"windows: got 'stridden'.*Did you mean 'strided'"):
        Settings(windows="stridden")
    with pytest.raises(UsageError, match="padding: got 'top'"):
        Settings(padding="top")
    with pytest.raises(UsageError, match="dtype: got 'fp8'"):
        resolve_dtype("fp8")
    assert unknown("x", "zzz", ["b", "a"]) == "x: got 'zzz', expected one of a, b."


def test_the_script_in_the_checkout_is_the_command(
    checkout: Path, llama: Path, texts: Path, tmp_path: Path, interpreter: WarmInterpreter
) -> None:
    script = checkout / "eval" / "perplexity.py"
    if not script.exists():
        pytest.skip("runs from a checkout alone")
    data = ["--data", f"wikitext:{texts / 'pages.txt'}", "--limit-docs", "1", "--output-dir", str(tmp_path)]
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = interpreter.run(code, tmp_path, str(llama), *data, "--quiet")
    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path, "wikitext")["data"]["documents"] == 1


def test_a_masked_model_says_last_words(bert: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"lambada:{texts / 'passages.jsonl'}", "--context", 12)
    evaluate(bert, *data, "--output-dir", tmp_path)
    report = report_of(tmp_path, "lambada")
    assert report["quality"]["arms"][0]["items"] == 6
    assert "masked at once" in report["protocol"]
    evaluate(bert, *data[:-1], 2, "--output-dir", tmp_path / "short", code=2, says="more than the")
    words = ("--data", texts / "plain.txt", "--stride", 4, "--output-dir", tmp_path / "strided")
    evaluate(bert, *words, code=2, says="disjoint")


def test_a_full_disk_loses_no_batch(llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (llama, "--data", texts, "--output-dir", tmp_path / "out", "--context", 16)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(journal.Journal, "append", failing(journal.Journal.append, 1, full))
        says = ("No space left on device; finished work is kept in", "--resume --output-dir")
        evaluate(*words, code=3, says=says)
    evaluate(*words, "--resume")
