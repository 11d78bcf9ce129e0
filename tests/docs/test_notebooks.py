"""Every notebook runs from top to bottom, offline, and is kept with what it showed."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from studies.notebooks import PATHS, cleaned

from ..support.pages import NONE, why_none
from ..support.source_tree import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000


def execute(notebook: nbformat.NotebookNode, place: Path) -> None:
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(place)}})
    client.execute()


@pytest.mark.slow
# the kernel's own sockets and event loop, when it is shut down
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_says_what_is_kept_in_it(path: Path, tmp_path: Path) -> None:
    stored, fresh = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    execute(fresh, tmp_path)
    kept, here = ([said(cell) for cell in notebook.cells] for notebook in (stored, cleaned(fresh)))
    assert alike(kept, here) > 0.7, (kept, here)


def said(cell: Any) -> str:
    return "".join(one.get("text", "") for one in cell.get("outputs", []))


def alike(kept: list[str], here: list[str]) -> float:
    """Share of lines that cells say in both; figures, and how often a line comes, are a machine's own.

    So is what a calibration finds: cells from it on say other things where none is found.
    """
    same = [*(why_none(one) == why_none(other) for one, other in zip(kept, here, strict=True)), False]
    told, found = (
        {" ".join(re.findall(r"[A-Za-z]{3,}", line)) for line in "\n".join(cells[: same.index(False)]).splitlines()}
        for cells in (kept, here)
    )
    return len(told & found) / max(len(told), len(found), 1)


def test_words_of_cells_count_until_a_calibration_finds_what_it_did_not_find_before() -> None:
    assert alike(["read 1 s", "passed"], ["read 2 s", "passed"]) == 1.0
    assert alike(["read", "passed", "a plan"], ["read", f"cannot: {NONE[0]}", "none"]) == 1.0
    assert alike(["read", "passed", "a plan"], ["lost", f"cannot: {NONE[0]}", "none"]) == 0.0
    assert alike(["read", "passed"], ["read", "failed"]) == 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failing_cell_is_noticed(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(notebook, tmp_path)


def wrong(notebook: Any) -> list[str]:
    """What a stored notebook lacks: outputs, none of which is an error, a warning or a path of a machine."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    found = [] if outputs and all(cell.execution_count for cell in code) else ["cells that did not run"]
    found += ["an error" for output in outputs if output.output_type == "error"]
    found += ["stderr" for output in outputs if output.get("name") == "stderr"]
    words = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs]
    found += ["a code of a colour" for word in words if "\x1b" in word]
    return found + [path[0] for word in words for path in [PATHS.search(word)] if path]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_its_outputs(path: Path) -> None:
    assert wrong(nbformat.read(path, as_version=4)) == []
    assert path.stat().st_size < MOST_BYTES
    assert any(re.search(r'"(image/\w+|text/html)"', each.read_text("utf-8")) for each in NOTEBOOKS), "no picture"


def test_what_is_wrong_is_noticed_and_cleaned() -> None:
    output = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell("1 / 0", execution_count=1)
    cell.outputs = [
        output("stream", name="stdout", text="plan: /somewhere/on/a/disk/plan.json, at \x1b[1m1/2"),
        output("stream", name="stderr", text="50%"),
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    assert wrong(notebook) == ["stderr", "a code of a colour", "/somewhere/on/a/disk/"]
    assert wrong(cleaned(notebook)) == []
    assert json.loads(nbformat.writes(notebook))["cells"][0]["outputs"][0]["text"] == ["plan: plan.json, at 1/2"]
    cell.outputs = [output("error", ename="ZeroDivisionError", evalue="", traceback=[])]
    assert wrong(notebook) == ["an error"]
    assert wrong(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])) == ["cells that did not run"]
