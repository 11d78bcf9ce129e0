"""`adaattn bench`: the grid, what a cell measures, the report and the gate."""

import errno
import json
import sys
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import Result

from adaattn_cli import bench as bench_module
from adaattn_cli.commands import BENCH
from adaattn_hf._files import write_atomically
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.bench import ways as ways_module
from adaattn_hf.eval.bench.grid import read_grid
from adaattn_hf.eval.bench.processes import cut
from adaattn_hf.eval.bench.report import markdown
from adaattn_hf.eval.bench.ways import KERNELS, ways
from adaattn_hf.eval.timing import measure, spread
from adaattn_hf.stats import stopwatch
from adaattn_hf.stats.stopwatch import Elapsed

from ..support.command import adaattn
from ..support.interrupting import interrupted
from ..support.source_tree import ROOT

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

CPU = torch.device("cpu")
DEFAULTS = {"floor": 0.0, "dtypes": ["float32"], "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 1}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"class": "LlamaForCausalLM", "config": "LlamaConfig", "arguments": {**SIZES, "num_key_value_heads": 2}}
BERT = {"class": "BertModel", "config": "BertConfig", "arguments": SIZES}
MODELS = {"llama": {**LLAMA, "causal": True, "ids": 64}, "bert": {**BERT, "causal": False, "ids": 64}}
ATTENTION = [
    {"name": "causal", "q_len": 20},
    {"name": "padded", "batch": 2, "q_len": 20, "padding": "left", "lengths": [20, 7]},
    {"name": "window", "q_len": 40, "window": 8},
    {"name": "chunks", "q_len": 40, "chunk": 16},
    {"name": "packed", "q_len": 30, "packed": [11, 19], "gradient": True},
    {"name": "decode", "q_len": 1, "kv_len": 33},
    {"name": "static", "q_len": 1, "kv_len": 33, "filled": 20},
    {"name": "kv", "batch": 2, "q_len": 3, "kv_len": 9, "mask": "bidirectional", "padding": "right", "lengths": [9, 4]},
]
RIGHT, LEFT = (
    {"prepared": True, "batch": 2, "q_len": 12, "padding": side, "lengths": [12, 5]} for side in ("right", "left")
)
WHOLE: list[dict[str, Any]] = [
    {"name": "pass", "model": "llama", "q_len": 12},
    {"name": "encoder", "model": "bert", **RIGHT},
    {"name": "prompt", "model": "llama", "cached": True, **LEFT},
    {"name": "training", "model": "llama", "gradient": True, **RIGHT},
    {"name": "step", "model": "llama", "prepared": True, "batch": 2, "q_len": 1, "kv_len": 30},
]


def write_grid(path: Path, *cells: dict[str, Any], **changes: Any) -> Path:
    data = {
        "defaults": DEFAULTS,
        "cells": [{"level": "model" if "model" in cell else "attention", **cell} for cell in cells],
        "models": MODELS,
        "stock": ["eager", "sdpa", "flash_attention_2"],
        **changes,
    }
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def bench(*arguments: object, **expected: Any) -> Result:
    return adaattn("bench", *arguments, **expected)


def reported(grid: Path, *arguments: object, rounds: int = 1) -> dict[str, Any]:
    """The report of a run, whose page is beside it."""
    output = grid.with_name("out.json")
    bench("--grid", grid, "--rounds", rounds, "--output", output, *arguments)
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    assert_fits(report)
    return report


def test_every_kind_of_cell_does_the_same_work_under_every_name(tmp_path: Path) -> None:
    report = reported(write_grid(tmp_path / "grid.yaml", *ATTENTION, *WHOLE), "--no-memory")
    assert [cell["title"] for cell in report["cells"]] == [f"{c['name']} (float32)" for c in [*ATTENTION, *WHOLE]]
    for cell in report["cells"]:
        assert set(cell["difference"]) == {"eager", "sdpa"}, cell["title"]
        assert max(cell["difference"].values()) < 1e-5, cell["title"]
        attention = cell["level"] == "attention"
        assert set(cell["error"]) == ({"adaattn", "eager", "sdpa"} if attention else set()), cell["title"]
        assert all(1e-9 < error < 1e-5 for error in cell["error"].values()), cell["title"]
        asked = next(c for c in [*ATTENTION, *WHOLE] if cell["title"] == f"{c['name']} (float32)")
        assert (cell["dtype"], cell["shape"]["q_len"]) == ("float32", asked["q_len"])
        assert ("heads" in cell["shape"]) == attention == ("configuration" not in cell["shape"])
        assert cell["best"] in ("eager", "sdpa")
    assert report["absent"] == {"flash_attention_2": "runs on CUDA"}
    page = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert not [text for text in ("| packed (float32) |", "flash_attention_2 (runs on CUDA)") if text not in page]


def test_ctrl_c_keeps_the_finished_cells_and_says_so(tmp_path: Path) -> None:
    names = [{"name": f"causal {size}", "q_len": size} for size in range(20, 60)]
    grid, output = write_grid(tmp_path / "grid.yaml", *names), tmp_path / "out.json"
    words = ["bench", "--grid", str(grid), "--rounds", "60", "--no-memory", "--output", str(output)]
    done = interrupted(words, output)
    assert done.returncode == 130, done.stderr
    says = f"interrupted: finished cells are kept in {output}; --output {output} --only REGEX adds others"
    assert says in done.stderr
    kept = [cell["title"] for cell in json.loads(output.read_text(encoding="utf-8"))["cells"]]
    assert 1 <= len(kept) < 40
    assert kept[0] == "causal 20 (float32)"


def test_a_full_disk_is_a_sentence_and_keeps_the_finished_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = write_grid(tmp_path / "grid.yaml", *({"name": f"causal {size}", "q_len": size} for size in (20, 30)))
    output = tmp_path / "out.json"

    def full(path: Path, content: bytes | str) -> None:
        if "causal 30" in str(content):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, content)

    monkeypatch.setattr(bench_module, "write_atomically", full)
    words = ("--grid", grid, "--rounds", 1, "--no-memory", "--output", output)
    bench(*words, code=3, says=f"No space left on device; finished cells are kept in {output}; ")
    assert [cell["title"] for cell in json.loads(output.read_text())["cells"]] == ["causal 20 (float32)"]


def assert_fits(report: dict[str, Any]) -> None:
    """The report is as `schema.json` says, and one that lacks a field or holds a wrong one is not."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs the package jsonschema")
    schema = json.loads(resources.files("adaattn_hf.eval.bench").joinpath("schema.json").read_text("utf-8"))
    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    check.validate(report)
    changes: list[dict[str, Any]] = [{"dtype": "int3"}, {"shape": {}}, {"error": {"eager": -1.0}}, {"speed": 1.0}]
    for change in changes:
        wrong = {**report, "cells": [{**report["cells"][0], **change}]}
        assert not check.is_valid(wrong), change
    assert not check.is_valid({**report, "provenance": {"python": "3"}})


def test_what_a_cell_compiles_takes_nothing_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its limit of variants torch runs a function as it is written, without a word."""

    @torch.compile(backend="eager", dynamic=False)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x if torch.compiler.is_compiling() else x * float("nan")

    grid = read_grid(None, "cpu")
    cells = [cell for cell in grid.cells if cell.level == "attention"][:3]
    monkeypatch.setattr(bench_module, "error_of", lambda cell, device: None)
    for size, cell in enumerate(cells, 2):
        work = partial(compiled, torch.ones(size))
        monkeypatch.setattr(bench_module, "ways", lambda cell, grid, device, work=work: lambda name: work)
        with torch._dynamo.config.patch(recompile_limit=1):
            found = bench_module.run_cell(cell, ["adaattn", "sdpa"], grid, CPU, BENCH(rounds=1, memory=False))
        assert found["difference"] == {"sdpa": 0.0}


def test_kernels_of_sdpa_are_timed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [{"name": "causal", "q_len": 20}, {"name": "pass", "model": "llama", "q_len": 12}]
    grid, names = write_grid(tmp_path / "grid.yaml", *cells), "sdpa,sdpa:flash,sdpa:math,sdpa:efficient,sdpa:cudnn"
    report = reported(grid, "--baseline", names)
    assert report["absent"] == {"sdpa:efficient": "runs on CUDA", "sdpa:cudnn": "runs on CUDA"}
    for cell in report["cells"]:
        assert set(cell["ratios"]) == {"sdpa", "sdpa:flash", "sdpa:math"}
        assert cell["best"] == "sdpa"  # a part of it is no implementation
        assert max(cell["difference"].values()) < 1e-5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        make = ways(read_grid(grid).cells[0], read_grid(grid), CPU)
        make("sdpa:math")()
    names_seen = {event.key for event in seen.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" in names_seen
    assert not [name for name in names_seen if "flash" in name]
    once = iter([list])  # one piece of work, and so one model, for all
    monkeypatch.setattr(ways_module, "attention_works", lambda cell, device: lambda name: next(once))
    make = ways(read_grid(grid).cells[0], read_grid(grid), CPU)
    assert [make(name)() for name in ("sdpa", "sdpa:flash", "sdpa:math")] == [[], [], []]


def test_a_profile_is_a_trace_of_each_way(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid.yaml", {"name": "pass", "model": "llama", "q_len": 12}, stock=["sdpa"])
    bench("--grid", grid, "--rounds", 1, "--no-memory", "--profile", tmp_path / "traces")
    found = {path.name: json.loads(path.read_text("utf-8")) for path in (tmp_path / "traces").glob("*.json")}
    assert set(found) == {"pass-float32-adaattn.json", "pass-float32-sdpa.json"}
    named = {
        name: [e["name"] for e in trace["traceEvents"] if e.get("name", "").startswith("adaattn layer")]
        for name, trace in found.items()
    }
    assert len(named["pass-float32-adaattn.json"]) == SIZES["num_hidden_layers"]
    assert named["pass-float32-adaattn.json"][0].startswith("adaattn layer 0: ")
    assert not named["pass-float32-sdpa.json"]
    assert "Self CPU" in (tmp_path / "traces" / "pass-float32-sdpa.txt").read_text(encoding="utf-8")


def test_the_gate_fails_below_a_floor_and_passes_above_it(tmp_path: Path) -> None:
    high = write_grid(tmp_path / "high.yaml", {"name": "causal", "q_len": 8, "floor": 1e6})
    bench("--grid", high, "--rounds", 1, "--gate", code=1, says="below its floor: causal (float32)")
    low = write_grid(tmp_path / "low.yaml", {"name": "causal", "q_len": 8, "floor": 1e-6})
    (cell,) = reported(low, "--gate")["cells"]
    assert cell["peak_bytes"]["eager"] > cell["peak_bytes"]["sdpa"] > 0


def test_a_cell_below_its_floor_is_measured_once_more_for_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = read_grid(write_grid(tmp_path / "grid.yaml", {"name": "causal", "q_len": 8, "floor": 1.0})).cells
    for gate, ratio in ((False, 0.5), (True, 1.5)):
        theirs = iter((1.0, 3.0))

        def measured(works: Any, rounds: int, device: Any, theirs: Any = theirs) -> Any:
            return {name: {"wall": [s], "process": [s]} for name, s in zip(works, (2.0, next(theirs)), strict=True)}

        monkeypatch.setattr(bench_module, "measure", measured)
        asked = BENCH(rounds=1, memory=False, gate=gate)
        found = bench_module.run_cell(cell, ["adaattn", "sdpa"], read_grid(), CPU, asked)
        assert found["ratio_best"]["wall"]["median"] == ratio


def test_what_has_nothing_to_win_is_left_out_unless_named(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid.yaml", {"name": "causal", "q_len": 8, "without": ["eager"]})
    for more, names in (((), {"sdpa"}), (("--baseline", "eager"), {"eager"})):
        printed = bench("--grid", grid, "--rounds", 1, "--no-memory", "--json", *more)
        assert set(json.loads(printed.stdout)["cells"][0]["ratios"]) == names


def test_a_run_of_some_cells_keeps_the_figures_of_the_others(tmp_path: Path) -> None:
    grid, output = write_grid(tmp_path / "grid.yaml", *ATTENTION[:2]), tmp_path / "out.json"
    arguments = ("--grid", grid, "--rounds", 1, "--output", output, "--no-memory")
    before = reported(grid, "--no-memory")
    after = reported(grid, "--no-memory", "--only", "padded")
    assert after["cells"][0] == before["cells"][0]
    assert after["cells"][1]["times"] != before["cells"][1]["times"]
    # what another version or processor measured is no neighbour, and is not thrown away unasked
    there, after["provenance"]["instructions"] = after["provenance"]["instructions"], "another set"
    output.write_text(json.dumps(after), encoding="utf-8")
    bench(*arguments, "--only", "padded", code=2, says=f"instructions were another set, are {there}")
    after["provenance"]["versions"]["torch"] = "0.1"
    output.write_text(json.dumps(after), encoding="utf-8")
    bench(*arguments, "--only", "padded", code=2, says=("versions was", "or delete it"))
    assert json.loads(output.read_text(encoding="utf-8")) == after


def test_files_that_would_be_lost_or_are_no_reports_are_refused(tmp_path: Path) -> None:
    grid, page = write_grid(tmp_path / "grid.yaml", ATTENTION[0]), tmp_path / "bench.md"
    short = ("--grid", grid, "--rounds", 1, "--no-memory")
    for words, says in (
        (("--output", page), "expected a name such as"),  # the Markdown would take the place of the JSON
        (("--output", tmp_path / "a.json", "--table", tmp_path / "a.json"), "where the Markdown goes"),
        (("--table", page), "and no --output"),
        (("--output", tmp_path / "a.json", "--table", f"{__file__}/a.md"), "cannot be made"),
    ):
        bench(*short, *words, code=2, says=says)
    assert not page.exists()
    kept = tmp_path / "notes.json"
    for text in ("# Notes\n", "{}", "[1]"):
        kept.write_text(text)
        bench(*short, "--output", kept, code=2, says="notes.json holds no report of `adaattn bench`")
        assert kept.read_text() == text


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, where nobody can make a file")
def test_a_place_that_permissions_alone_allow_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "ways", None)
    grid = write_grid(tmp_path / "grid.yaml", ATTENTION[0])
    bench("--grid", grid, "--output", "/proc/bench.json", code=2, says="output: /proc cannot be written to")


@pytest.mark.parametrize("text", ["[1, 2]", "cells: 3", "a: [", "cells: [{name: x, dtypes: [float32]}]\ndefaults: {}"])
def test_a_grid_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"grid: .*grid\.yaml is no grid \(\w+"):
        read_grid(path)


def test_unknown_cells_and_keys_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without --output the file has the second's name, and another test may write it
    grid = write_grid(tmp_path / "grid.yaml", {"name": "causal", "q_len": 8})
    result = bench("--grid", grid, "--only", "nothing", code=2)
    assert "causal (float32)" in result.stderr.splitlines(), "one a line"
    bench("--grid", grid, "--only", "(", code=2)
    for wrong, words in (
        (("--grid", tmp_path / "none.yaml"), "none.yaml is no file"),
        (("--attn-implementation", "adatn"), "Did you mean 'adaattn'?"),
        (("--attn-implementation", "adaattn_triton"), "expected what serves causal (float32): backend 'triton'"),
        (("--baseline", "eager,sdpaa"), "Did you mean 'sdpa'?"),
        (("--output", f"{__file__}/bench.json"), "cannot be made"),
    ):
        bench("--grid", grid, *wrong, code=2, says=words)
    with pytest.raises(UsageError, match=r"'causal'.*kv_length"):
        read_grid(write_grid(tmp_path / "bad.yaml", {"name": "causal", "q_len": 8, "kv_length": 9}))


def test_a_stock_implementation_that_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> Any:
        if name == "eager":
            raise NotImplementedError("not this shape")
        return lambda: torch.ones(2)

    monkeypatch.setattr(bench_module, "ways", lambda cell, grid, device: make)
    monkeypatch.setattr(bench_module, "error_of", lambda cell, device: None)
    grid = read_grid(write_grid(tmp_path / "grid.yaml", {"name": "causal", "q_len": 8}))
    found = bench_module.run_cell(grid.cells[0], ["adaattn", "eager", "sdpa"], grid, CPU, BENCH(rounds=2, memory=False))
    assert found["refused"] == {"eager": "not this shape"}
    assert found["best"] == "sdpa"
    with pytest.raises(NotImplementedError):  # ours may not refuse
        bench_module.run_cell(grid.cells[0], ["eager", "sdpa"], grid, CPU, BENCH(rounds=2, memory=False))


def test_the_grid_of_the_package_covers_what_it_promises() -> None:
    grid = read_grid()
    titles = [cell.title for cell in grid.cells]
    assert len(set(titles)) == len(titles)
    assert all(cell.floor >= 0.97 for cell in grid.cells)
    assert {cell.model for cell in grid.cells} - {None} <= set(grid.models)
    wanted = "BERT batch,left-padded,packed,causal 8k,window,GQA decode 16k,MQA,static,cross,tiny,GPT-2 small,BERT base"
    assert not [one for one in wanted.split(",") if not any(one in title for title in titles)]
    assert any(cell.gradient for cell in grid.cells)


def test_floors_are_those_of_the_device_they_were_set_for(tmp_path: Path) -> None:
    own = write_grid(tmp_path / "grid.yaml", {"name": "causal", "q_len": 8, "floor": 2.0}, device="cpu")
    assert [read_grid(own, device).cells[0].floor for device in ("cpu", "cuda")] == [2.0, 0.0]


def test_slower_cells_are_listed_with_the_reason(tmp_path: Path) -> None:
    cell = {"name": "causal", "q_len": 8}
    report = reported(write_grid(tmp_path / "grid.yaml", cell, slower={"cpu": "Because of it."}), rounds=2)
    for ratio, listed in ((0.9, True), (0.98, True), (1.01, False)):
        report["cells"][0]["ratio_best"]["wall"]["median"] = ratio
        page = markdown(report, "out.json")
        assert (f"causal (float32) {ratio:.2f}." in page) == listed
        assert ("Because of it." in page) == listed


def test_an_answer_ends_first_as_long_as_quicker_steps_have_not_made_up_for_the_prompt() -> None:
    report = json.loads((ROOT / "docs" / "results" / "rivals_avx512_bf16.json").read_text("utf-8"))
    prompt, step = report["cells"] = [cell for cell in report["cells"] if "SmolLM2" in cell["title"]]
    for name, read, token in (("adaattn", 1.0, 0.2), ("llama.cpp", 3.0, 0.1), ("llama.cpp:plain", 0.9, 0.1)):
        prompt["times"][name]["wall"]["median"], step["times"][name]["wall"]["median"] = read, token
    page = markdown(report, "out.json")
    assert "* llama.cpp: 20 tokens behind 2,048\n" in page
    assert "* llama.cpp:plain" not in page


def test_samples_alternate_and_those_of_what_is_no_rival_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []
    seconds = {"ours": 1e-3, "near": 9e-3, "far": 11e-3}

    def timed(name: str, device: torch.device, repeats: int = 1) -> tuple[None, Elapsed]:
        order.append((name, repeats))
        return None, Elapsed(seconds[name], seconds[name])

    monkeypatch.setattr(stopwatch, "timed", timed)
    times = measure({name: name for name in seconds}, 3, CPU)  # type: ignore[misc]
    assert {name: len(clocks["wall"]) for name, clocks in times.items()} == {"ours": 3, "near": 3, "far": 2}
    ours, near, far = ("ours", 10), ("near", 1), ("far", 1)
    assert order[6:] == [ours, near, far, far, near, ours, ours, near]
    assert spread([1.0, 2.0, 3.0]) == {"median": 2.0, "quartile_25": 1.5, "quartile_75": 2.5}


def kept_reports() -> list[str]:
    reports = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs" / "results").glob("*.json")}
    return sorted(name for name, text in reports.items() if '"ours":' in text and '"ratio_best":' in text)


@pytest.mark.parametrize("name", kept_reports())
def test_kept_reports_fit_name_where_they_come_from_and_have_their_page(name: str) -> None:
    report = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8"))
    assert_fits(report)
    assert traced(report)
    page = ROOT / ("BENCHMARKS.md" if name == "bench" else f"docs/results/{name}.md")
    assert page.read_text("utf-8") == markdown(report, f"{name}.json")


def traced(report: dict[str, Any]) -> bool:
    """Whether each cell names its commit, and the report its device, on a GPU with the driver."""
    made = report["provenance"]
    return all(cell["commit"] for cell in report["cells"]) and bool(made["driver"] or made["device"] == "cpu")


def test_a_report_without_commit_or_driver_is_found() -> None:
    made, cells = {"device": "cpu", "driver": None}, [{"commit": "a"}, {"commit": "b"}]
    assert traced({"provenance": made, "cells": cells})
    assert not traced({"provenance": made, "cells": [*cells, {"commit": None}]})
    assert not traced({"provenance": {**made, "device": "NVIDIA H100"}, "cells": cells})


def test_a_gpu_has_a_grid_of_its_own_beside_every_kernel_of_stock() -> None:
    grid, small = read_grid(device="cuda"), read_grid()
    assert {cell.title for cell in grid.cells}.isdisjoint(cell.title for cell in small.cells)
    assert any(cell.floor > 1 for cell in grid.cells), "floors of this device"
    assert set(grid.stock) == {*small.stock, *KERNELS} - {"sdpa:math"}
    assert {name for cell in grid.cells for name in cell.without} == {"flex_attention"}


STAND_IN = """#!{python}
import json, pathlib, sys
import numpy as np
task = json.loads(sys.stdin.readline())
if task["engine"] == "llama.cpp":
    sys.exit("no such file")
pathlib.Path(task["exported"]).mkdir(parents=True, exist_ok=True)
np.savez(task["answer"], *(np.ones((len(rows), 32)) for rows in task["rows"]))
print(json.dumps({{"versions": {{"stand-in": "1"}}, "threads": task["threads"]}}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"wall": 1e-9, "process": 1e-9, "peak_bytes": 7 << 20}}), flush=True)
"""
ARMS = ("adaattn", "sdpa, float32", "openvino:int8, each text alone", "llama.cpp")


def test_arms_are_processes_of_their_own_and_engines_of_another_environment(tmp_path: Path) -> None:
    rival = tmp_path / "bin" / "python"
    rival.parent.mkdir()
    rival.write_text(STAND_IN.format(python=sys.executable))
    rival.chmod(0o755)
    cell = {"name": "encoder", "model": "bert", **RIGHT, "arms": list(ARMS), "dtypes": ["bfloat16"]}
    (found,) = reported(write_grid(tmp_path / "grid.yaml", cell, stock=[]), "--rivals", rival)["cells"]
    assert found["refused"] == {"llama.cpp": "no such file"}
    ours, reference, engine = (found["error"][name] for name in ARMS[:-1])
    assert reference < 1e-9 < ours < 1e-3 < engine, "an answer that is another one is seen"
    assert sorted(found["peak_bytes"].values())[1] > 50 << 20 > found["peak_bytes"][ARMS[2]], "of whole processes"
    assert found["runs"][ARMS[2]] == {"versions": {"stand-in": "1"}, "threads": torch.get_num_threads()}
    *_, table = (tmp_path / "out.md").read_text("utf-8").partition("71% of them real; prepared. Best of stock: sdpa,")
    assert f"| {ARMS[2]} | 1e-06 (1e-06–1e-06) |" in table, "neither ours nor an engine is stock"


def test_arms_cut_a_batch_and_step_in_every_cache_and_an_absent_engine_says_how_to_get_it(tmp_path: Path) -> None:
    assert [cut([[5], [5] * 9], [how]) for how in ("", "sorted into four")] == [[[0, 1]], [[1], [0]]]
    step = {**WHOLE[4], "batch": 1, "arms": ["adaattn", "sdpa, float32", "sdpa, StaticCache", "openvino"]}
    (found,) = reported(write_grid(tmp_path / "grid.yaml", step, stock=[]), "--no-memory")["cells"]
    assert {*step["arms"][:3]} == {name for name, error in found["error"].items() if error < 1e-6}
    assert "`make rivals` sets one up" in found["refused"]["openvino"]


def test_engines_answer_nearly_as_stock_does(tmp_path: Path) -> None:
    rival, engines = ROOT / ".venv-rivals" / "bin" / "python", ["onnxruntime:int8", "openvino:int8"]
    if not rival.exists():
        pytest.skip("ONNX Runtime and OpenVINO are not installed: `make rivals` sets up their environment")
    cell = {"name": "encoder", "model": "bert", **RIGHT, "arms": ["adaattn", "sdpa, float32", *engines]}
    (found,) = reported(write_grid(tmp_path / "grid.yaml", cell, stock=[]), "--rivals", rival)["cells"]
    assert all(1e-9 < found["error"][engine] < 0.05 for engine in engines), "bytes are not exact, and the same model"
