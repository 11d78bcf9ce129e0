"""Every notebook runs from top to bottom, offline, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from ..support.source_tree import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(notebook: nbformat.NotebookNode, place: Path) -> None:
    """Run all cells in a fresh kernel."""
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(place)}})
    client.execute()


@pytest.mark.slow
# the kernel's own sockets and event loop, when it is shut down
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    execute(nbformat.read(path, as_version=4), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failing_cell_is_noticed(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 + 1 == 3")])
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute(notebook, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    kept = [cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(kept)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
