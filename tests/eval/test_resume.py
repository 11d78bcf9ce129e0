"""Interruptions: at every stage nothing that was finished is lost, and the numbers are those of one run, bit by bit."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaattn_hf.errors import JournalMismatch
from adaattn_hf.eval import corpora, journal, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint

from .conftest import PAGES, PASSAGES

SETTINGS = Settings(attn_implementation="eager", batch_size=2, context=16)


def corpus() -> corpora.Corpus:
    return corpora.wikitext_corpus(PAGES[1:], "own pages")


def run(loaded: checkpoint.Checkpoint, output: Path | None, **keywords: Any) -> dict[str, Any]:
    return runner.evaluate(loaded, corpus(), SETTINGS, output=output, **keywords)


def quality_bytes(report: dict[str, Any]) -> bytes:
    return json.dumps(report["quality"], sort_keys=True).encode()


class Stop:
    """Interrupts the forward passes at the n-th call, as Ctrl-C would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.calls, self.after = 0, after
        self._forward: Callable[..., torch.Tensor] = runner.forward
        monkeypatch.setattr(runner, "forward", self)

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.after:
            raise KeyboardInterrupt
        return self._forward(*args, **options)


def test_an_interruption_in_any_phase_loses_nothing(
    loaded: checkpoint.Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(loaded, None)
    # one per arm for memory, then one per arm and batch
    count = 2 + 2 * len(runner.measure(loaded, corpus(), SETTINGS).records)
    assert count > 12
    # both passes for memory, all of the first two batches, and the last batch
    for after in (*range(1, 7), count - 1, count):
        output = tmp_path / str(after)
        with monkeypatch.context() as patch:
            stop = Stop(patch, after)
            with pytest.raises(KeyboardInterrupt):
                run(loaded, output)
        kept = len((output / journal.NAME).read_bytes().splitlines()) - 1
        assert kept == max(0, after - 3) // 2  # every batch whose two passes were done
        with monkeypatch.context() as patch:
            stop = Stop(patch, 0)
            resumed = run(loaded, output, resume=True)
        assert stop.calls == count - 2 * kept  # and none of them is computed again
        assert quality_bytes(resumed) == quality_bytes(whole)


def test_a_torn_last_line_is_measured_again(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    whole = run(loaded, tmp_path)
    path = tmp_path / journal.NAME
    full = path.read_bytes()
    last = full.splitlines(keepends=True)[-1]
    for torn in (1, len(last) // 2, len(last) - 1):
        path.write_bytes(full[:-torn])
        assert quality_bytes(run(loaded, tmp_path, resume=True)) == quality_bytes(whole)
        assert len(path.read_bytes().splitlines()) == len(full.splitlines())


@pytest.mark.parametrize("kept", [0, 1, -1])
def test_a_torn_first_line_is_a_run_that_did_not_begin(kept: int, tmp_path: Path) -> None:
    with journal.Journal(tmp_path, {"a": 1}):
        whole = (tmp_path / journal.NAME).read_bytes()
    for resume in (False, True):
        (tmp_path / journal.NAME).write_bytes(whole[:kept])
        with journal.Journal(tmp_path, {"a": 1}, resume=resume) as again:
            assert (again.records, again.path.read_bytes()) == ({}, whole)


def test_a_damaged_line_is_not_believed(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    whole = run(loaded, tmp_path)
    path = tmp_path / journal.NAME
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"wall"', b'"well"')
    path.write_bytes(b"".join(lines))
    assert quality_bytes(run(loaded, tmp_path, resume=True)) == quality_bytes(whole)


def test_a_finished_run_resumes_to_itself(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    first = run(loaded, tmp_path)
    again = run(loaded, tmp_path, resume=True)
    assert quality_bytes(first) == quality_bytes(again)
    assert first["cost"]["speed"] == again["cost"]["speed"]  # read from the journal, not timed again
    assert json.loads((tmp_path / runner.REPORT).read_text())["quality"] == again["quality"]


def test_a_journal_is_not_overwritten_unasked(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    before = (tmp_path / journal.NAME).read_bytes()
    with pytest.raises(JournalMismatch, match="--resume"):
        run(loaded, tmp_path)
    assert (tmp_path / journal.NAME).read_bytes() == before


@pytest.mark.parametrize(("change", "names"), [
    ({"settings": replace(SETTINGS, attn_implementation="adaattn")}, "attn_implementation: there 'eager', now"),
    ({"settings": replace(SETTINGS, batch_size=3)}, "settings.batch_size: there 2, now 3"),
    ({"corpus": corpora.lastword_corpus(PASSAGES, "other")}, "data: there"), ({"weights": True}, "weights: there"),
])  # fmt: skip
def test_another_runs_journal_is_refused(llama: Path, tmp_path: Path, change: dict[str, Any], names: str) -> None:
    mine = checkpoint.load(llama, device="cpu")
    run(mine, tmp_path)
    before = (tmp_path / journal.NAME).read_bytes()
    if change.get("weights"):
        with torch.no_grad():
            mine.model.model.norm.weight[0] += 1e-3
    asked = change.get("corpus", corpus()), change.get("settings", SETTINGS)
    with pytest.raises(JournalMismatch, match=re.escape(names)):
        runner.evaluate(mine, *asked, output=tmp_path, resume=True)
    assert (tmp_path / journal.NAME).read_bytes() == before


def test_two_writers_do_not_share_a_journal(tmp_path: Path) -> None:
    another = pytest.raises(JournalMismatch, match="is being written by another process")
    with journal.Journal(tmp_path, {"a": 1}, resume=False), another:
        journal.Journal(tmp_path, {"a": 1}, resume=True)
    with journal.Journal(tmp_path, {"a": 1}, resume=True) as again:
        assert not again.records


def test_a_foreign_file_is_refused(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    (tmp_path / journal.NAME).write_text("not ours\n")
    with pytest.raises(JournalMismatch, match="no journal of this program"):
        run(loaded, tmp_path, resume=True)


def test_records_survive_the_file_bit_by_bit(loaded: checkpoint.Checkpoint, tmp_path: Path) -> None:
    measured = runner.measure(loaded, corpus(), SETTINGS, output=tmp_path)
    heading = json.loads((tmp_path / journal.NAME).read_bytes().splitlines()[0].partition(b" ")[2])
    with journal.Journal(tmp_path, heading["fingerprint"], resume=True) as kept:
        for index, record in enumerate(measured.records):
            assert kept.records[index].scores.nll.tobytes() == record.scores.nll.tobytes()
            assert kept.records[index].scores.kl.tobytes() == record.scores.kl.tobytes()
            assert (kept.records[index].scores.hit == record.scores.hit).all()
            assert kept.records[index].elapsed == record.elapsed
