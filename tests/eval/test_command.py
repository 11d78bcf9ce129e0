"""`adaattn eval` and `adaattn explain` as a user meets them: arguments, files, exit codes, messages."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from typer.testing import CliRunner, Result

from adaattn_hf.cli.main import app
from adaattn_hf.errors import EXIT_CODES, UsageError, unknown
from adaattn_hf.eval import journal, runner, scoring
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches.checkpoint import resolve_dtype

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], terminal_width=200)


def evaluate(*arguments: object) -> Result:
    return invoke("eval", *arguments, "--attn-implementation", "eager")


def report_of(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name / runner.REPORT).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_two_corpora_make_two_reports_and_one_page(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--data", f"lambada:{texts / 'passages.jsonl'}")
    result = invoke("eval", llama, *data, "--batch-size", 2, "--output-dir", tmp_path, "--anchor", "eager")
    assert result.exit_code == 0, result.output
    pages, lastword = report_of(tmp_path, "wikitext"), report_of(tmp_path, "lambada")
    assert [a["implementation"] for a in pages["quality"]["arms"]] == ["sdpa", "adaattn", "eager"]
    assert abs(pages["quality"]["comparisons"][0]["perplexity_ratio"]["value"] - 1) < 1e-5
    assert pages["activation"][1]["rate"] == 0.0
    assert lastword["quality"]["arms"][0]["items"] == 6
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## tiny-llama on wikitext (3 documents), float32" in page
    assert "## tiny-llama on lambada (6 documents), float32" in page
    assert f"{pages['quality']['arms'][1]['word_perplexity']:.4g}" in page  # of a model that never learned: beyond 1e6
    assert "adaattn (tested)" in result.output


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_other_families(request: pytest.FixtureRequest, kind: str, texts: Path, tmp_path: Path) -> None:
    directory = request.getfixturevalue(kind)
    data = ("--data", texts / "plain.txt", "--limit-tokens", 60, "--mask-fraction", 0.5)
    result = invoke("eval", directory, *data, "--output-dir", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    report = report_of(tmp_path, "plain")
    assert report["model"]["objective"] == ("masked" if kind == "bert" else "causal")
    assert report["quality"]["arms"][0]["word_perplexity"] is None  # the text was cut: words are not counted
    assert "sdpa" not in result.output  # quiet


def test_bounds_decide_the_exit_code(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--limit-docs", 2)
    kept = evaluate(
        llama, *data, "--max-delta-nll", 0.01, "--max-ppl-ratio", 1.01, "--output-dir", tmp_path / "a", "--json"
    )
    assert kept.exit_code == 0, kept.output
    assert json.loads(kept.stdout) == report_of(tmp_path / "a", "wikitext")
    assert all(bound["kept"] for bound in report_of(tmp_path / "a", "wikitext")["bounds"])
    broken = evaluate(llama, *data, "--max-delta-nll", -1.0, "--output-dir", tmp_path / "b")
    assert broken.exit_code == 1
    assert "max_delta_nll -1" in broken.output
    assert "above it" in (tmp_path / "b" / "report.md").read_text(encoding="utf-8")


def test_json_holds_the_reports_of_this_run_alone(llama: Path, texts: Path, tmp_path: Path) -> None:
    """And not those that lie in the directory since earlier."""
    output = ("--limit-tokens", 40, "--output-dir", tmp_path, "--json")
    assert evaluate(llama, "--data", texts / "plain.txt", *output).exit_code == 0
    other = evaluate(llama, "--data", f"wikitext:{texts / 'pages.txt'}", *output)
    assert other.exit_code == 0, other.output
    assert json.loads(other.stdout) == report_of(tmp_path, "wikitext")


def test_a_default_place_that_cannot_be_written_is_told_before_weights_are_read(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").touch()
    monkeypatch.delattr(tf.AutoModelForCausalLM, "from_pretrained")
    for words in ((llama, "--data", texts / "plain.txt"), ()):
        refused = evaluate(*words)
        assert refused.exit_code == 2, refused.output
        assert "output_dir: results/eval/" in refused.stderr
        assert "give a directory that can be written" in refused.stderr


def test_one_window_proves_no_bound(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("the lamp", encoding="utf-8")
    result = evaluate(llama, "--data", path, "--max-delta-nll", 1.0, "--output-dir", tmp_path / "out")
    assert result.exit_code == 1
    assert "no interval" in result.output


def test_an_interrupted_command_says_how_to_go_on_and_does(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (llama, "--data", f"wikitext:{texts / 'pages.txt'}", "--context", 16, "--output-dir", tmp_path)
    forward, calls = scoring.forward, []

    def interrupted(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return forward(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "forward", interrupted)
        first = evaluate(*arguments)
    assert first.exit_code == 130
    assert f"--resume --output-dir {tmp_path}" in first.output
    assert evaluate(*arguments).exit_code == 5
    assert evaluate(*arguments, "--resume").exit_code == 0
    assert report_of(tmp_path, "wikitext")["quality"]["arms"][0]["tokens"] > 100


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
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
        (("--data", "{pages}", "--threads", "0"), 2, "threads is 0, expected at least 1"),
        (("--data", "{pages}", "--output-dir", f"{__file__}/out"), 2, "cannot be made"),
        (("--data", "{pages}", "--resume"), 2, "no --output-dir"),
        (("--data", "{pages}", "--resume", "--overwrite"), 2, "both"),
        (("--data", "{pages}", "--data", "{pages}"), 2, "different names"),
        (("--data", "{pages}", "--objective", "seq2seq"), 2, "Invalid value for '--objective'"),
        (("--data", "{passages}", "--limit-tokens", "9"), 2, "--limit-docs"),
        (("--data", "{passages}", "--limit-tokens", "9", "--tokenizer", "/nowhere"), 2, "--limit-docs"),
        (("--data", "nowhere.txt"), 3, "no file or directory here"),
        (("--data", "{pages}", "--tokenizer", "/nowhere"), 4, "tokenizer: cannot load"),
        (("--data", "{pages}", "--no-such-option",), 2, "No such option"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"pages": f"wikitext:{texts / 'pages.txt'}", "passages": f"lambada:{texts / 'passages.jsonl'}"}
    result = invoke("eval", llama, *(a.format(**names) for a in arguments))
    assert result.exit_code == code, result.output
    assert says in result.output
    assert not list(tmp_path.rglob("report.json"))


def test_reports_stay_in_the_output_directory(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a directory named after its text, whatever way the text is named."""
    shutil.copytree(texts, tmp_path / "texts")
    (tmp_path / "texts" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "texts" / "below")
    done = evaluate(llama, "--data", "..", "--limit-tokens", 40, "--output-dir", tmp_path / "out", "--quiet")
    assert done.exit_code == 0, done.output
    assert report_of(tmp_path / "out", "texts")["data"]["origin"] == "texts"
    assert not (tmp_path / "report.json").exists()


def test_models_that_cannot_be_had(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--output-dir", tmp_path / "out")
    absent = evaluate(tmp_path / "nothing", *data)
    assert (absent.exit_code, "cannot load" in absent.output) == (4, True)
    both = evaluate(tmp_path / "nothing", "--data", "nowhere.txt")
    assert (both.exit_code, "there is no such directory" in both.output) == (4, True)
    config = tf.AutoConfig.from_pretrained(llama)
    tf.AutoModel.from_config(config).save_pretrained(tmp_path / "headless")
    tf.AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path / "headless")
    headless = evaluate(tmp_path / "headless", *data)
    assert (headless.exit_code, "language-model head" in headless.output) == (4, True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.Q4.gguf").touch()
    assert "--gguf-file model.Q4.gguf" in evaluate(tmp_path / "folder", *data).output
    forced = evaluate(tmp_path / "headless", *data, "--objective", "causal")
    assert (forced.exit_code, "would be random" in forced.output) == (4, True)


def test_a_backend_that_refuses_is_a_model_that_cannot_be_had(llama: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--output-dir", tmp_path)
    result = invoke("eval", llama, *data, "--attn-implementation", "adaattn_fa2", "--device", "cpu")
    assert result.exit_code == 4
    assert "flash-attn" in result.output


def test_rolling_windows_need_a_prefix_token(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the weights are read."""
    tokenizer = tf.AutoTokenizer.from_pretrained(llama)
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = ("--data", texts / "plain.txt", "--tokenizer", tmp_path / "tokenizer", "--output-dir", tmp_path / "out")
    with monkeypatch.context() as without:
        without.delattr(tf.AutoModelForCausalLM, "from_pretrained")
        refused = evaluate(llama, *data)
    assert (refused.exit_code, "--prefix-token" in refused.output) == (2, True)
    assert evaluate(llama, *data, "--prefix-token", 1).exit_code == 0
    strided = evaluate(llama, *data, "--windows", "strided", "--overwrite")
    assert strided.exit_code == 0


def test_help_states_the_exit_codes() -> None:
    result = invoke("eval", "--help")
    assert result.exit_code == 0
    shown = " ".join(result.output.split())
    for code in EXIT_CODES:
        assert f"{code} " in shown
    assert "data unavailable" in shown


def test_an_unknown_command_names_the_nearest() -> None:
    result = invoke("evl")
    assert result.exit_code == 2
    assert "eval" in result.output


def test_explain_reads_the_configuration_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    result = invoke("explain", tmp_path, "--device", "cpu", "--verbose")
    assert result.exit_code == 0, result.output
    assert "prefill" in result.output
    assert "flash-attn is not installed" in result.output or "flash-attn runs on CUDA" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("{llama}", "--attn-implementation", "sdpa"), 2, "attn_implementation: got 'sdpa'"),
        (("{llama}", "--attn-implementation", "adaattn_fa2", "--device", "cpu"), 4, "cannot explain"),
        (("/nowhere",), 4, "cannot explain"),
        (("{llama}", "--dtype", "int4"), 2, "Invalid value for '--dtype'"),
    ],
)
def test_explain_refuses(llama: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    result = invoke("explain", *(a.format(llama=llama) for a in arguments))
    assert result.exit_code == code, result.output
    assert says in result.output


def test_programs_hear_of_unknown_words_as_well() -> None:
    """The command line completes and checks them before."""
    with pytest.raises(UsageError, match=r"windows: got 'stridden'.*Did you mean 'strided'"):
        Settings(windows="stridden")
    with pytest.raises(UsageError, match="padding: got 'top'"):
        Settings(padding="top")
    with pytest.raises(UsageError, match="dtype: got 'fp8'"):
        resolve_dtype("fp8")


def test_an_unknown_name_without_a_near_one_lists_all() -> None:
    assert unknown("x", "zzz", ["b", "a"], "Do this.") == "x: got 'zzz', expected one of a, b. Do this."


def test_the_script_in_the_checkout_is_the_command(checkout: Path, llama: Path, texts: Path, tmp_path: Path) -> None:
    script = checkout / "eval" / "perplexity.py"
    if not script.exists():
        pytest.skip("runs from a checkout alone")
    data = ["--data", f"wikitext:{texts / 'pages.txt'}", "--limit-docs", "1", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), str(llama), *data, "--quiet"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path, "wikitext")["data"]["documents"] == 1


def test_a_polite_kill_ends_like_an_interruption(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = scoring.forward, []

    def killed(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGTERM)
        return forward(*given, **options)

    monkeypatch.setattr(scoring, "forward", killed)
    before = signal.getsignal(signal.SIGTERM)
    data = ("--data", f"wikitext:{texts / 'pages.txt'}", "--context", 16)
    result = evaluate(llama, *data, "--output-dir", tmp_path)
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert len((tmp_path / "wikitext" / "journal.jsonl").read_bytes().splitlines()) > 1


def test_a_masked_model_says_last_words(bert: Path, texts: Path, tmp_path: Path) -> None:
    data = ("--data", f"lambada:{texts / 'passages.jsonl'}", "--context", 12)
    assert evaluate(bert, *data, "--output-dir", tmp_path).exit_code == 0
    report = report_of(tmp_path, "lambada")
    assert report["quality"]["arms"][0]["items"] == 6
    assert "masked at once" in report["protocol"]
    short = evaluate(bert, *data[:-1], 2, "--output-dir", tmp_path / "short")
    assert (short.exit_code, "more than the" in short.output) == (2, True)
    strided = evaluate(bert, "--data", texts / "plain.txt", "--stride", 4, "--output-dir", tmp_path / "strided")
    assert (strided.exit_code, "disjoint" in strided.output) == (2, True)


def test_a_full_disk_is_a_sentence_and_keeps_finished_batches(
    llama: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: journal.Journal, batch: int, record: journal.BatchRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "append", full)
        done = evaluate(llama, "--data", texts, "--output-dir", tmp_path / "out", "--context", 16)
    assert done.exit_code == 3, done.output
    assert "No space left on device; finished batches are kept, and --resume goes on" in done.output
    assert "Traceback" not in done.output
    again = evaluate(llama, "--data", texts, "--output-dir", tmp_path / "out", "--context", 16, "--resume")
    assert again.exit_code == 0, again.output
