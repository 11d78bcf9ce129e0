"""Reports: tables say what the JSON says, the JSON says where it came from, and cost and activation are measured."""

import copy
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
import torch
from packaging.version import Version
from rich.console import Console

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.library import level_here, library, missing
from adaattn_hf.eval import corpora, provenance, report, runner, showcase, summary, timing
from adaattn_hf.eval.metric_compute import compute, metric_path
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint
from adaattn_hf.stats.stopwatch import timed

from ..support.calls import attended
from .conftest import OWN_PAGES, OWN_PASSAGES, PAGES, PASSAGES

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reports(loaded: checkpoint.Checkpoint) -> dict[str, dict[str, Any]]:
    corpus = {"pages": OWN_PAGES, "lastword": OWN_PASSAGES}
    made = {
        kind: runner.evaluate(loaded, c, Settings(attn_implementation="adaattn", anchor="eager", batch_size=2))
        for kind, c in corpus.items()
    }
    return {kind: json.loads(json.dumps(r, allow_nan=False)) for kind, r in made.items()}


def shown(made: dict[str, Any], width: int = 240) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report.terminal_table(made, verbose=width > 80))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("kind", ["pages", "lastword"])
def test_both_tables_hold_the_numbers_of_the_json(reports: dict[str, Any], kind: str) -> None:
    made = reports[kind]
    for text in (shown(made), report.markdown([made])):
        assert f"{made['quality']['arms'][0]['perplexity']:.6f}" in text
        assert f"{made['quality']['comparisons'][1]['kl_mean']:.3e}" in text
        assert f"{made['cost']['speed'][1]['speed_ratio_wall']['median']:.3f}" in text
    assert made["protocol"] in report.markdown([made])


@pytest.mark.parametrize("kind", ["pages", "lastword"])
def test_a_terminal_of_80_columns_gets_five_rows_that_break_no_number(reports: dict[str, Any], kind: str) -> None:
    lines = shown(reports[kind], width=80).splitlines()
    names = [line[1:].split("│")[0].strip() for line in lines if line.startswith("│")]
    assert list(filter(None, names)) == list(report.BRIEF[kind].values())
    parts = " ".join(lines).replace("│", " ").split()
    rows = [values for label, values in report.rows(reports[kind])[1] if label in report.BRIEF[kind]]
    numbers = [one for cells in rows for cell in cells for one in cell.replace(" %", "%").split(" ")]
    assert [one for one in numbers if one not in " ".join(parts)] == []


def test_a_table_follows_its_json(reports: dict[str, Any]) -> None:
    changed = copy.deepcopy(reports["pages"])
    changed["quality"]["arms"][1]["perplexity"] = 12345.678
    changed["quality"]["comparisons"][0]["delta_nll"] |= {"mean": 0.5, "low": None, "upper": None}
    changed["activation"][1]["rate"] = 0.25
    changed["quality"]["comparisons"][0]["perplexity_ratio"]["upper"] = None
    changed["bounds"] = report.bounds(changed, 1.1)
    text = report.markdown([changed])
    assert "12345.678000" in text
    assert "+5.000e-1 (one cluster: no interval)" in text
    assert "| 0.2500 |" in text
    assert "* Bound max_ppl_ratio: asked 1.1, no interval" in text


@pytest.mark.parametrize(("per_word", "said"), [(40.25, "40.250000"), (1.234e32, "1.234e+32"), (None, "-")])
def test_a_perplexity_per_word_may_say_nothing(reports: dict[str, Any], per_word: float | None, said: str) -> None:
    changed = copy.deepcopy(reports["pages"])
    for arm in changed["quality"]["arms"][:2]:
        arm["word_perplexity"] = per_word
    changed["quality"]["arms"][2]["word_perplexity"] = 41.0
    sentence = f"too short for a perplexity per word ({changed['quality']['arms'][0]['words']} words)"
    for text in (shown(changed), report.markdown([changed])):
        assert re.search(rf"perplexity per word +[|│] +{re.escape(said)} [|│ ]+{re.escape(said)} ", text)
        assert (sentence in text) == (per_word != 40.25)


def test_markdown_tables_are_square_and_have_the_rows_of_their_text(reports: dict[str, Any]) -> None:
    for kind, there, absent in (("lastword", "McNemar", "bits per byte"), ("pages", "bits per byte", "McNemar")):
        assert there in report.markdown([reports[kind]])
        assert absent not in report.markdown([reports[kind]])
    lines = [line for line in report.markdown(list(reports.values())).splitlines() if line.startswith("|")]
    assert len(lines) > 30
    assert {line.count("|") for line in lines} == {5}


def test_provenance_is_complete(reports: dict[str, Any]) -> None:
    source = reports["pages"]["provenance"]
    assert Version(source["versions"]["torch"]).public == Version(torch.__version__).public  # the build adds its suffix
    assert source["threads"] == torch.get_num_threads()
    assert source["device"] == "cpu"
    assert source["cpu"]
    assert source["instructions"] == level_here()
    assert reports["pages"]["data"]["sha256"] == corpora.wikitext_corpus(PAGES, "elsewhere").sha256
    assert re.fullmatch(r"[0-9a-f]{64}", reports["pages"]["model"]["weights_sha256"])
    assert source["source"] == provenance.source_digest()
    assert re.fullmatch(r"[0-9a-f]{64}", source["source"])
    assert source["driver"] is None


def test_processors_of_one_name_are_told_apart_by_their_instructions(reports: dict[str, Any]) -> None:
    source = reports["pages"]["provenance"]
    for level, words in (("avx2", f"Machine: {source['cpu']} (avx2), "), ("none", f"Machine: {source['cpu']}, ")):
        other = {**reports["pages"], "provenance": {**source, "instructions": level}}
        assert words in report.markdown([other])
    earlier = {name: value for name, value in source.items() if name != "instructions"}
    assert provenance.processor(earlier) == source["cpu"]


def test_the_commit_is_the_one_that_is_said_or_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAATTN_COMMIT", raising=False)
    (tmp_path / "__init__.py").touch()
    assert provenance.commit(tmp_path) is None
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit(tmp_path) or "")
    (tmp_path / "__init__.py").write_text("changed = True\n", encoding="utf-8")
    assert re.fullmatch(r"[0-9a-f]{40}\+dirty", provenance.commit(tmp_path) or "")
    monkeypatch.setenv("ADAATTN_COMMIT", "abc1234")
    assert provenance.commit(tmp_path) == "abc1234"


def test_arms_share_weights_and_nothing_else(loaded: checkpoint.Checkpoint) -> None:
    first, second = (checkpoint.with_attention(loaded, name) for name in ("sdpa", "eager"))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a.data_ptr() == b.data_ptr()
    assert first.config is not second.config
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("sdpa", "eager")
    assert first.model.layers[0].self_attn.config is first.config


def test_peak_bytes_on_a_known_course() -> None:
    def course() -> None:
        first = torch.ones(1000)
        second = first + 1
        del first
        third = second.view(10, 100) * 2  # a view is no new storage
        del second
        third.add_(1)  # nor is an operation in place

    peak, how = timing.peak_bytes(course, CPU)
    assert 8000 <= peak < 8000 + 64  # and the scalars that operators make of numbers
    assert "native kernels" in how


@pytest.mark.skipif(library() is None, reason="; ".join(missing()))
def test_peak_bytes_hold_the_native_kernels_buffers() -> None:
    heads, length = 4, 512
    query, key, value = (torch.randn(1, heads, length, 32) for _ in range(3))
    call = AttentionCall(query, key, value, MaskStructure(1, length, length, True), 1.0)
    attended("native", call)
    peak, _ = timing.peak_bytes(lambda: attended("native", call), CPU)
    output, packed = query.nbytes, 2 * key.nbytes // heads  # at least one head's keys and values are copied
    assert peak >= output + packed
    # and not those of all heads: a thread packs one head over the other
    assert peak < output + 2 * key.nbytes + torch.get_num_threads() * (1 << 20)


def test_peak_bytes_follow_the_batch(loaded: checkpoint.Checkpoint) -> None:
    both = (Settings(attn_implementation="eager", context=n) for n in (16, 64))
    few, many = (runner.evaluate(loaded, OWN_PAGES, each)["cost"]["memory"][0]["peak_bytes"] for each in both)
    assert many > 3 * few


def test_arms_take_turns_and_ratios_are_stock_over_arm() -> None:
    assert [timing.turn(3, batch) for batch in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    speed = timing.ratio_summary([2.0, 4.0, 6.0], [1.0, 1.0, 1.0])
    assert speed.items() >= {"median": 4.0, "quartile_25": 3.0, "quartile_75": 5.0, "total": 4.0, "batches": 3}.items()
    result, elapsed = timed(lambda: sum(range(100_000)), CPU)
    assert result == 4999950000
    assert min(elapsed.wall, elapsed.process) > 0


def test_the_rate_is_of_pairs_or_there_is_a_reason(reports: dict[str, dict[str, Any]]) -> None:
    found = summary.activation("adaattn", True, [(100, 10), None, (300, 90)])
    assert (found["rate"], found["pairs"], found["batches"]) == (0.25, 400, 2)
    assert reports["pages"]["plans"] == [None] * 3
    exact = summary.activation("adaattn", False, [None])
    assert (exact["rate"], "no plan" in exact["reason"]) == (0.0, True)
    assert summary.activation("sdpa", False, [None])["rate"] is None
    assert summary.activation("adaattn", True, [None])["reason"] == "no attention call was counted"


@pytest.mark.parametrize("batches", [1, 31, 32, 33, 500])
def test_watched_batches_are_few_and_spread(batches: int) -> None:
    watched = [i for i in range(batches) if runner.is_watched(i, batches)]
    assert watched[0] == 0
    assert min(batches, 16) <= len(watched) <= runner.WATCHED_BATCHES
    assert batches - watched[-1] <= max(1, -(-batches // runner.WATCHED_BATCHES))


def test_the_metric_of_the_package_computes(llama: Path, loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    metric = evaluate.load(metric_path(), cache_dir=str(tmp_path))
    texts = list(PASSAGES[:3])
    found = metric.compute(predictions=texts, model_id=str(llama), attn_implementation="adaattn", device="cpu")
    corpus = corpora.text_corpus(texts, "texts", "texts")
    expected = runner.evaluate(loaded, corpus, Settings())["quality"]["arms"][1]
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-9)
    assert found["tokens"] == expected["tokens"]
    assert len(found["perplexities"]) == 3
    assert found["mean_perplexity"] == pytest.approx(np.mean(found["perplexities"]))
    assert abs(found["delta_nll"]) < 1e-6
    # against itself
    found = compute(PASSAGES[:2], str(llama), attn_implementation="eager", baseline="eager", device="cpu")
    assert (found["delta_nll"], found["upper"], found["kl_mean"]) == (0.0, 0.0, 0.0)


def test_bars_of_the_showcase() -> None:
    def made(dtype: str, delta: float, anchor: float, half: float) -> dict[str, Any]:
        def entry(name: str, mean: float) -> dict[str, Any]:
            limits = {"mean": mean, "low": mean - half, "high": mean + half}
            return {"implementation": name, "delta_nll": limits, "perplexity_ratio": {"value": float(np.exp(mean))}}

        quality = {"comparisons": [entry("adaattn", delta), entry("eager", anchor)]}
        return {"model": {"name": "m", "dtype": dtype}, "data": {"name": "d"}, "quality": quality}

    assert showcase.verdict(made("float32", 9e-6, 0, 0))[0]
    assert not showcase.verdict(made("float32", -1.1e-5, 0, 1))[0]
    assert showcase.verdict(made("bfloat16", 3e-4, -2e-4, 1.5e-4))[0]
    kept, sentence = showcase.verdict(made("bfloat16", 4e-4, -2e-4, 1.5e-4))
    assert not kept
    assert "4.00e-04 > 3.50e-04, eager's from stock" in sentence


def test_a_perplexity_beyond_floats_is_written_as_absent(tmp_path: Path) -> None:
    runner.write_json(tmp_path / "x.json", {"a": float("inf"), "b": [1.5, float("nan")]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [1.5, None]}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_names_bring_no_markup_and_no_escape_sequences(reports: dict[str, Any]) -> None:
    made = copy.deepcopy(reports["pages"])
    made["model"]["name"] = "evil\x1b]0;owned\x07 | <script> [red]x"
    made["data"]["origin"] = "a|b <img>\x9b31m"
    page, terminal = report.markdown([made]), shown(made)
    assert not any(mark in page for mark in ("<script>", "<img>", "\x1b", "\x9b"))
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {5}
    assert "\x1b]" not in terminal
    assert "[red]x" in terminal
