"""The harness of the first page at the size of a trial, and what its pages refuse."""

import copy
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, XLMRobertaConfig, XLMRobertaForSequenceClassification, XLMRobertaModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestStatus

import adaattn_hf
from adaattn_hf.errors import UsageError
from studies import quality
from studies.front import __main__ as front
from studies.front import jobs, page, served

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTHS = (20, 10, 8, 4, 3, 3, 2, 2)
BERT = "BERT", BertModel, BertConfig(**TINY)
XLMR = "XLM-R", XLMRobertaModel, XLMRobertaConfig(**TINY, max_position_embeddings=30)
RERANKER = "a reranker", XLMRobertaForSequenceClassification, XLMR[2]
OUT = {"flex_attention": "compiles for long"}
MAKES: dict[str, Callable[[], jobs.Job]] = {
    "unsorted": lambda: jobs.encoders(CPU, LENGTHS, BERT, OUT, "float32", 0, True),
    "sorted": lambda: jobs.encoders(CPU, (8, 8, 8, 8), BERT, OUT, "float32", 0, True),
    "query": lambda: jobs.encoders(CPU, (4,), BERT, OUT, "float32", 0, True),
    "gpu embedder": lambda: jobs.encoders(CPU, LENGTHS, XLMR, OUT, "float32"),
    "gpu reranker sorted": lambda: jobs.encoders(CPU, LENGTHS, RERANKER, OUT, "float32", 3),
    "prompt": lambda: jobs.prompt(CPU, 2, 16, TINY, left=True, absent=OUT),
    "step": lambda: jobs.steps(CPU, 1, 64, TINY, absent=OUT),
}


@pytest.mark.parametrize("name", MAKES)
def test_each_cell_has_every_arm_of_the_protocol(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.SHARED, "vocab_size", 1024)
    monkeypatch.setitem(front.CELLS, name, lambda device, directory: MAKES[name]())
    file = tmp_path / "cells.json"
    monkeypatch.setattr(sys, "argv", ["front", str(file), name])
    front.main()
    cells = json.loads(file.read_text())
    monkeypatch.setitem(cells[name]["provenance"], "commit", "abcdef1")
    assert page.checked(cells) is cells
    arms = cells[name]["arms"]
    assert {len(arm["process"]) for arm in arms.values() if "wall" in arm} == {page.LEAST}
    assert arms["adaattn, DynamicCache" if name in ("prompt", "step") else "adaattn"]["wall"]
    assert ("sorted, in batches of 3" in cells[name]["says"]) is (name == "gpu reranker sorted")
    monkeypatch.setitem(front.CELLS, name, lambda device, directory: pytest.fail("measured again"))
    front.main()
    monkeypatch.setattr(sys, "argv", ["front", str(file), "no such cell"])
    with pytest.raises(SystemExit):
        front.main()


def test_an_arm_that_cannot_run_is_kept_with_its_reason_and_one_is_not_first_in_every_round() -> None:
    order: list[str] = []

    def refuse() -> None:
        raise RuntimeError("no kernel\nbelow")

    arms = {name: jobs.Arm(partial(order.append, name)) for name in ("sdpa", "adaattn")}
    job = jobs.Job("a", {}, {**arms, "eager": jobs.Arm(refuse), "flex_attention": "left out"})
    found = jobs.measure(job, CPU, 2)
    assert found["eager"] == {"absent": "RuntimeError: no kernel"}
    assert found["flex_attention"] == {"absent": "left out"}
    assert order[4:] == ["sdpa", "adaattn", "adaattn", "sdpa"]


def test_texts_without_padding_are_those_of_the_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "way", lambda model, call, name: jobs.Arm(call))
    arm = jobs.encoders(CPU, LENGTHS, XLMR, OUT, "float32").arms[jobs.FLAT]
    assert isinstance(arm, jobs.Arm)
    model, (flat,) = arm.call.args  # type: ignore[attr-defined]
    model.set_attn_implementation("adaattn")
    rows = flat["input_ids"][0].split(LENGTHS)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
    with torch.no_grad():
        found, expected = model(**flat)[0][0], model(padded, attention_mask=(padded != 1).long())[0]
    torch.testing.assert_close(found, expected[padded != 1], atol=1e-5, rtol=1e-5)


def test_an_engine_reads_prompts_once_and_an_arm_serves_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "WINDOW", 16)
    read: list[int] = []
    # asynchronous batching, which needs CUDA, forgets pages of a prompt that takes more than one step
    mark = next(name for name in dir(PagedAttentionCache) if name.startswith("mark_") and "complete" in name)
    keep = getattr(PagedAttentionCache, mark)

    def forget(cache: Any, state: Any, blocks: Any) -> None:
        if state.status != RequestStatus.PREFILLING:
            keep(cache, state, blocks)

    monkeypatch.setattr(PagedAttentionCache, mark, forget)
    job = served.requests(CPU, None, 4, 80)
    assert list(job.arms)[-1] == served.PLAN
    assert "16 keys and 4 sinks" in job.conditions["plan"]
    engine = job.arms[served.PLAN].call  # type: ignore[union-attr]
    assert adaattn_hf.plan_of(engine.model) is not None  # type: ignore[attr-defined]
    engine.model.model.embed_tokens.register_forward_pre_hook(lambda _, ids: read.append(ids[0].numel()))  # type: ignore[attr-defined]
    try:
        assert engine() > 0
        assert 4 * 80 <= sum(read) < 2 * 4 * 80
        read.clear()
        assert engine() > 0
        assert sum(read) <= 4 * (80 - 64 + served.NEW), "two pages of each prompt are kept"
    finally:
        job.after()


@pytest.fixture
def cells() -> Any:
    return json.loads((page_of("gpu")).read_text(encoding="utf-8"))


def page_of(place: str) -> Path:
    return Path(__file__).parents[2] / "docs" / "results" / f"front_{place}.json"


NAME = "gpu encoder large 256"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda cell: cell["arms"].pop("eager"), "no 15 rounds of 'eager' and no reason why"),
        (lambda cell: cell["arms"]["eager"].update(absent=""), "no 15 rounds of 'eager' and no reason why"),
        (lambda cell: cell["arms"]["sdpa"]["wall"].pop(), "no 15 rounds of 'sdpa'"),
        (lambda cell: cell["arms"]["adaattn"]["wall"].pop(), "no 15 rounds of 'adaattn'"),
        (lambda cell: cell["provenance"].update(commit=None), "has no commit"),
        (lambda cell: cell["provenance"].update(driver=None), "has no driver"),
        (lambda cell: cell["provenance"]["versions"].pop("torch"), "has no torch"),
        (lambda cell: cell.update(date=""), "has no date"),
        (lambda cell: cell["conditions"].pop("dtype"), "has no dtype"),
        (lambda cell: cell["provenance"].update(device="cpu", threads=2), "no processor time of 'sdpa'"),
        (lambda cell: cell["provenance"].update(device="another"), "cells of 2 machines or versions"),
    ],
)
def test_a_cell_that_breaks_the_protocol_is_refused(
    spoil: Callable[[dict[str, Any]], Any], says: str, cells: dict[str, Any]
) -> None:
    page.checked(cells)
    spoil(cells[NAME])
    with pytest.raises(UsageError, match=says):
        page.checked(cells)


def test_cells_of_several_sources_name_their_commits(cells: dict[str, Any]) -> None:
    for cell in cells.values():
        cell["provenance"]["source"] = "one"
    assert "; commit " not in page.every_arm(cells)
    cells[NAME]["provenance"].update(source="another", commit="abcdef123456")
    assert page.every_arm(page.checked(cells)).count("; commit abcdef123") == 1


def test_rerankers_have_a_table_of_their_own_with_the_memory_of_a_call(cells: dict[str, Any]) -> None:
    cells = {NAME: cells[NAME]}
    assert page.of_texts(cells) == "Not measured yet."
    name, unpadded = "gpu reranker 256", "flash_attention_2, unpadded"
    cells[name] = copy.deepcopy(cells[NAME])
    with pytest.raises(UsageError, match=f"no 15 rounds of '{unpadded}'"):
        page.checked(cells)
    for arm in (arms := cells[name]["arms"]).values():
        arm["peak"] = 3 << 20
    arms[unpadded] = copy.deepcopy(arms["sdpa"]) | {"wall": [1e-6] * page.LEAST}
    arms["adaattn, plan"] = arms[unpadded]
    shown = page.of_texts(page.checked(cells))
    assert shown.count("[Encoders](guides/encoders.md)") == 1
    assert "| flash-attn 2, unpadded |" in shown.splitlines()[3]
    assert shown.count("memory of a call, MiB") == 1
    assert shown.count("| 3 |") == sum("wall" in arm for arm in arms.values())
    assert page.stock_and_ours(cells[name])[1] == "adaattn", "a plan is not what the string alone brings"


def test_a_row_without_its_cell_is_refused(cells: dict[str, Any]) -> None:
    del cells[NAME]
    with pytest.raises(UsageError, match="gpu encoder large 256: not measured"):
        page.gains(cells, page.ROWS["gpu"])


def test_the_baseline_is_the_fastest_arm_of_stock_whatever_its_name(cells: dict[str, Any]) -> None:
    cell = cells[NAME]
    stock, alone, prepared = page.stock_and_ours(cell)
    middle = {name: statistics.median(arm["wall"]) for name, arm in cell["arms"].items() if "wall" in arm}
    assert (alone, prepared) == ("adaattn", "adaattn, prepare")
    assert middle[stock] == min(each for name, each in middle.items() if not name.startswith("adaattn"))
    faster = copy.deepcopy(cells)
    faster[NAME]["arms"]["eager"] = {"wall": [1e-6] * page.LEAST, "kernels": 1e-6}
    assert page.stock_and_ours(faster[NAME])[0] == "eager"
    assert page.speedup(faster[NAME], "eager", "adaattn, prepare")[1] < 0.01
    for block in (page.gains, lambda *given: [bar.figure for bar in page.bars(*given)]):
        assert block(faster, page.ROWS["gpu"]) != block(cells, page.ROWS["gpu"])


def test_a_row_is_bold_only_where_the_lower_quartile_is_a_gain(cells: dict[str, Any]) -> None:
    row = page.Row(NAME, ("Encoders", "encoders.md"))
    arms = cells[NAME]["arms"]
    for name in [one for one in arms if one.startswith("adaattn")]:
        arms[name]["wall"] = [1.5 * seconds for seconds in arms[page.stock_and_ours(cells[NAME])[0]]["wall"]]
    arms["adaattn, prepare"]["wall"] = [seconds / 1.8 for seconds in arms["adaattn, prepare"]["wall"]]
    assert "**1." in page.gains(cells, [row]).splitlines()[-1]
    arms["adaattn, prepare"]["wall"][:4] = [1.0] * 4
    assert "**" not in page.gains(cells, [row]).splitlines()[-1]


def test_what_waits_for_the_host_is_marked(cells: dict[str, Any]) -> None:
    row = page.Row(NAME, ("Encoders", "encoders.md"))
    assert "¹" not in page.gains(cells, [row])
    cells[NAME]["arms"]["adaattn, prepare"]["kernels"] = 1e-3
    assert "¹" in page.gains(cells, [row])


def test_the_page_of_quality_shows_the_kept_reports_and_refuses_one_without_a_commit(tmp_path: Path) -> None:
    kept = json.loads((page_of("gpu").with_name("quality.json")).read_text(encoding="utf-8"))
    for name, report in kept.items():
        file = tmp_path.joinpath("runs", *name.split(", "), "report.json")
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(report))
    quality.write(tmp_path / "runs", tmp_path)
    for suffix in ("json", "md"):
        shown = page_of("gpu").with_name(f"quality.{suffix}").read_text(encoding="utf-8")
        assert (tmp_path / f"quality.{suffix}").read_text(encoding="utf-8") == shown
    report["provenance"]["commit"] = None
    file.write_text(json.dumps(report))
    with pytest.raises(UsageError, match="has no commit"):
        quality.write(tmp_path / "runs", tmp_path)
