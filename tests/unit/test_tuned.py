"""The measured table: what it says, when it is believed, and that selection follows it and nothing else does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import adaattn_hf
from adaattn_hf.attention.request import AttentionRequest
from adaattn_hf.attention.structure import CallStructure
from adaattn_hf.backends.base import spec_of
from adaattn_hf.backends.probes import KINDS, probes
from adaattn_hf.backends.select import BACKENDS, attend, choose
from adaattn_hf.backends.table import Cell, Table, TableError, cell_of, clearly_faster
from adaattn_hf.backends.tuning import measure
from adaattn_hf.cli import main
from adaattn_hf.cli.classes import grid
from adaattn_hf.patches import tuned

from ..support.models import config_of

CELL = Cell("causal", "float32", 16, False, False, 32, 0, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, in which a table is looked for; what was chosen by it is forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ADAATTN_TUNE", "file")
    tuned.forget()
    yield tmp_path
    monkeypatch.setenv("ADAATTN_TUNE", "off")
    tuned.forget()


def call(length: int, dim: int = 16, **changes: Any) -> AttentionRequest:
    q, k, v = (torch.randn(1, 2, length, dim) for _ in range(3))
    return AttentionRequest(q, k, v, CallStructure(1, length, length, causal=True), dim**-0.5, **changes)


def as_if(**microseconds: float) -> Any:
    """A clock that says what it is told, a little scattered."""

    def clock(calls: Mapping[str, Any]) -> dict[str, list[float]]:
        return {name: [microseconds[name] * f for f in (0.99, 1.0, 1.01)] for name in calls}

    return clock


SLOWER, FASTER = as_if(native=100.0, sdpa=200.0), as_if(native=100.0, sdpa=50.0)


def test_auto_follows_the_table_for_its_class_of_calls_alone() -> None:
    before = {n: choose(spec_of(call(n))).name for n in (8, 16, 17, 32, 33)}
    assert set(before.values()) == {"native"}
    tuned.keep("cpu", CELL, FASTER)
    tuned.forget()  # as another process: it reads the file
    assert {n: choose(spec_of(call(n))).name for n in before} == {**before, 17: "sdpa", 32: "sdpa"}
    inside = spec_of(call(32))
    assert choose(inside, "native").name == "native"  # a named backend is that backend
    others = [
        {"head_dim": 24, "head_dim_v": 24}, {"dtype": torch.bfloat16}, {"needs_grad": True}, {"softcap": True},
        {"need_lse": True}, {"compiling": True}, {"kind": "window", "windowed": True}, {"windowed": True},
        {"head_windows": True},
        {"kind": "ragged"}, {"stored": "int8"},
    ]  # fmt: skip
    assert [choose(inside._replace(**other)).name for other in others] == ["native"] * len(others)


def test_the_answer_is_that_of_the_backend_that_the_table_names() -> None:
    tuned.keep("cpu", CELL, FASTER)
    tuned.forget()
    asked = call(20)
    assert torch.equal(attend(asked).out, BACKENDS["sdpa"].attend(asked).out)


def test_a_table_that_agrees_changes_nothing() -> None:
    tuned.keep("cpu", CELL, SLOWER)
    tuned.forget()
    assert choose(spec_of(call(32))).name == "native"


@pytest.mark.parametrize("value", ["off", "file"])
def test_without_a_table_nothing_is_measured(
    value: str, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setenv("ADAATTN_TUNE", value)
    assert choose(spec_of(call(32))).name == "native"
    assert list(cache.iterdir()) == []


def test_off_reads_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep("cpu", CELL, FASTER)
    monkeypatch.setenv("ADAATTN_TUNE", "off")
    tuned.forget()
    assert choose(spec_of(call(32))).name == "native"


def test_first_measures_once_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAATTN_TUNE", "first")
    drawn = torch.get_rng_state()
    with torch.inference_mode():
        choose(spec_of(call_of_zeros(32)))
    assert torch.equal(drawn, torch.get_rng_state())
    path = tuned.path_of("cpu")
    table = Table.read(path, tuned.key_of("cpu"))
    assert list(table.cells) == [CELL]
    assert {name: len(spreads) for name, spreads in table.cells[CELL].items()} == {"native": 2, "sdpa": 2}
    written = path.stat().st_mtime_ns
    tuned.forget()
    choose(spec_of(call_of_zeros(30)))
    assert path.stat().st_mtime_ns == written
    choose(spec_of(call_of_zeros(33)))
    assert len(Table.read(path, tuned.key_of("cpu")).cells) == 2


def call_of_zeros(length: int) -> AttentionRequest:
    x = torch.zeros(1, 2, length, 16)
    return AttentionRequest(x, x, x, CallStructure(1, length, length, causal=True), 0.25)


def test_first_measures_nothing_while_somebody_listens(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    monkeypatch.setenv("ADAATTN_TUNE", "first")
    with Listener():
        assert choose(spec_of(call_of_zeros(32))).name == "native"
    assert list(cache.iterdir()) == []


def test_a_setting_that_nobody_knows_lists_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAATTN_TUNE", "frist")
    with pytest.raises(ValueError, match=r"ADAATTN_TUNE: got 'frist', .*Did you mean 'first'\?"):
        choose(spec_of(call(32)))


ONE = [(9.0, 10.0, 11.0)]


@pytest.mark.parametrize(
    ("times", "names"),
    [
        ({"native": ONE}, ()),
        ({"native": ONE, "sdpa": [(8.0, 8.5, 8.9)]}, ("sdpa",)),
        ({"native": ONE, "sdpa": [(8.0, 8.5, 9.1)]}, ()),  # the spreads touch
        ({"native": [(9.9, 10.0, 10.1)], "sdpa": [(9.7, 9.75, 9.8)]}, ()),  # apart, and less than the margin
        ({"native": ONE * 2, "sdpa": [(1.0, 1.0, 1.0), (9.0, 10.0, 11.0)]}, ()),  # faster at one end alone
        ({"native": ONE, "fa4": [(3.0, 3.0, 3.0)], "sdpa": [(2.0, 2.0, 2.0)]}, ("sdpa", "fa4")),
        ({"sdpa": ONE, "fa4": [(1.0, 1.0, 1.0)]}, ()),  # the default was not measured
        ({}, ()),
    ],
)
def test_a_backend_must_win_clearly(times: dict[str, Any], names: tuple[str, ...]) -> None:
    assert clearly_faster(times, "native") == names


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = Table({"device": "x"}, {CELL: {"native": ONE, "sdpa": ONE}, CELL._replace(length=64): {}})
    path = tmp_path / "table.json"
    path.write_text(table.text())
    assert Table.read(path, {"device": "x"}) == table
    path.write_text(Table({"device": "x"}).text())
    assert Table.read(path, {"device": "x"}).cells == {}


def damaged() -> Iterator[str]:
    whole = Table({"device": "x"}, {CELL: {"native": ONE, "sdpa": ONE}}).text()
    yield from (
        "",
        "{",
        "[]",
        "[" * 200_000,
        "null",
        whole[:-20],
        whole.replace("9.0", '"9"', 1).replace("10.0", "8.0", 1),
    )
    yield from (
        whole.replace("9.0", "-9.0", 1),
        whole.replace("11.0", "NaN", 1),
        whole.replace('"kind"', '"kin"'),
    )
    yield whole.replace('"sdpa": [[', '"sdpa": [[1, 2, 3], [')
    yield whole.replace('"length": 32', '"length": "32"')


@pytest.mark.parametrize("text", list(damaged()), ids=lambda text: f"{len(text)}")
def test_a_damaged_file_is_named_with_the_remedy(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(TableError, match=r"table\.json: no table of measurements .*`adaattn tune --reset`"):
        Table.read(path, {"device": "x"})


@pytest.mark.parametrize(
    ("name", "was", "here"),
    [("torch", "2.6.0", None), ("driver", "580", "absent"), ("format", "7", "absent")],
)
def test_a_table_of_another_machine_is_ignored_loudly(name: str, was: str, here: str | None) -> None:
    tuned.keep("cpu", CELL, FASTER)
    path = tuned.path_of("cpu")
    data = json.loads(path.read_text())
    if name == "format":
        data["format"] = 7
    else:
        data["key"][name] = was
    path.write_text(json.dumps(data))
    tuned.forget()
    with pytest.warns(
        UserWarning, match=rf"measured under {name} {was} \(here {re.escape(here or torch.__version__)}"
    ) as said:
        found = [choose(spec_of(call(n))).name for n in (32, 33)]
    assert found == ["native"] * 2
    assert len(said) == 1
    assert "`adaattn tune`" in str(said[0].message)


def test_first_leaves_the_table_of_another_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned.path_of("cpu")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    monkeypatch.setenv("ADAATTN_TUNE", "first")
    with pytest.warns(UserWarning, match="until then"):
        choose(spec_of(call(32)))
    choose(spec_of(call(33)))
    assert path.read_text() == "{"
    assert tuned.begin("cpu").startswith(str(path))
    choose(spec_of(call(33)))
    assert len(Table.read(path, tuned.key_of("cpu")).cells) == 1


def test_one_query_behind_a_window_is_no_call_of_the_table() -> None:
    x = torch.zeros(1, 2, 64, 16)
    step = CallStructure(1, 1, 64, causal=True, q_offset=63, window=8)
    padding = torch.arange(64)[None] >= torch.tensor([[0], [20]])
    padded = CallStructure(2, 64, 64, causal=True, window=8, key_padding=padding)
    assert cell_of(spec_of(AttentionRequest(x[:, :, :1], x, x, step, 0.25))) is None
    both = x.expand(2, -1, -1, -1)
    assert cell_of(spec_of(AttentionRequest(both, both, both, padded, 0.25))._replace(holes=False)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_probe_is_of_its_class(kind: str) -> None:
    cells = [c for c in grid("cpu", ["float32", "bfloat16"], [64], [kind], 1) if c.length <= 1024]
    made = [
        (cell, cell_of(spec_of(request))) for cell in cells for request in probes("cpu", cell, blank=True)
    ]
    assert len(made) > 10
    assert [(cell, found) for cell, found in made if cell != found] == []


def test_gradients_are_measured_with_both_passes() -> None:
    cell = CELL._replace(gradient=True)
    (first, *_) = probes("cpu", cell)
    assert cell_of(spec_of(first)) == cell
    assert set(tuned.keep("cpu", cell).cells[cell]) == {"native", "sdpa"}


def test_a_backend_that_fails_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(BACKENDS["sdpa"], "attend", fail)
    monkeypatch.setattr(BACKENDS["sdpa"], "prepare", lambda *args: fail)
    with pytest.warns(UserWarning, match="sdpa fails at causal, float32, .*: no such kernel"):
        assert tuned.keep("cpu", CELL).cells[CELL] == {}


def test_a_device_without_room_for_a_probe_keeps_no_times_of_it() -> None:
    def full(calls: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    with pytest.warns(UserWarning, match="no room: causal, float32, head_dim 16, up to 32 keys: tried to"):
        assert measure("cpu", CELL, full) == {}


def test_explain_and_doctor_show_it() -> None:
    made = tf.AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation="adaattn")
    choice = adaattn_hf.explain(made).layers[0]
    assert choice.measured == ()
    (cell,) = {cell_of(choice.spec)}
    assert cell is not None
    tuned.keep("cpu", cell._replace(length=64), FASTER)
    tuned.forget()
    explanation = adaattn_hf.explain(made)
    assert "measured: sdpa for 33 to 64 keys" in str(explanation)
    assert explanation.layers[0].backend == "native"  # the dry pass has eight tokens
    said = CliRunner().invoke(main.app, ["doctor", "--json"]).stdout
    (line,) = (found for found in json.loads(said) if found["name"] == "measured table")
    assert line["state"].startswith("1 classes of calls in ")


def run(*words: str) -> Any:
    return CliRunner().invoke(main.app, ["tune", *words])


SMALL = ("--device", "cpu", "--longest", "4", "--kinds", "full", "--dtype", "float32", "--head-dim", "8")


def test_the_command_measures_keeps_and_deletes() -> None:
    done = run(*SMALL, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    path = Path(report["file"])
    assert path == tuned.path_of("cpu")
    assert {(row["kind"], row["length"]) for row in report["cells"]} == {("full", 2), ("full", 4)}
    assert all(set(row["times"]) == {"native", "sdpa"} and row["taken"] for row in report["cells"])
    written = path.stat().st_mtime_ns
    assert "classes of calls" in run(*SMALL).stdout
    assert path.stat().st_mtime_ns == written  # what is there is not measured again
    assert "deleted" in run("--device", "cpu", "--reset").stdout
    assert not path.exists()
    assert "there was none" in run("--device", "cpu", "--reset").stdout


def test_the_command_says_what_left_the_order_and_begins_anew_over_a_damaged_file() -> None:
    for cell in grid("cpu", ["float32"], [8], ["full"], 1):
        if cell.length <= 4:
            tuned.keep("cpu", cell, FASTER)
    assert "sdpa for native" in run(*SMALL).stdout
    tuned.path_of("cpu").write_text("{")
    done = run(*SMALL)
    assert done.exit_code == 0
    assert "begun anew" in done.stderr
    assert Table.read(tuned.path_of("cpu"), tuned.key_of("cpu")).cells


def test_nothing_is_measured_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tuned, "keep", None)
    done = run(*SMALL)
    assert done.exit_code == 2, done.output
    assert "XDG_CACHE_HOME" in done.stderr
    assert "give a directory that can be written" in done.stderr


def test_doctor_lives_with_a_setting_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAATTN_TUNE", "frist")
    done = CliRunner().invoke(main.app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    (found,) = (one["state"] for one in json.loads(done.stdout) if one["name"] == "measured table")
    assert found.startswith("not used: ADAATTN_TUNE: got 'frist'")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "tpu"), "device: got 'tpu'"),
        (("--dtype", "int8"), "dtype: got 'int8'"),
        (("--kinds", "casual"), "Did you mean 'causal'?"),
        (("--head-dim", "64,x"), "head-dim: got '64,x'"),
    ],
)
def test_wrong_words_are_usage_errors(words: tuple[str, ...], says: str) -> None:
    done = run("--device", "cpu", *words)
    assert done.exit_code == 2
    assert says in done.stderr
