"""A GPU suite that nobody could run is not green where a GPU is asked for; one that ran leaves a record."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..support import gpu_record
from ..support.source_tree import ROOT
from ..support.warm import WarmInterpreter

BLIND = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins that Transformers has imported before pytest


@pytest.mark.parametrize(
    ("options", "code"), [(("-p", "no:xdist"), 0), (("-n", "1", "--require-gpu"), 1)], ids=["as it is", "required"]
)
def test_skipped_gpu_tests_are_counted_and_refused(
    options: tuple[str, ...], code: int, interpreter: WarmInterpreter
) -> None:
    """Also where one process reports what others skipped."""
    done = interpreter.run(BLIND, ROOT, "-q", *IMPORTED, *options, "tests/gpu/test_devices.py")
    assert done.returncode == code, done.stdout + done.stderr
    counts = [re.findall(pattern, done.stdout) for pattern in (r"BLOCKED: (\d+)", r"(\d+) skipped")]
    assert counts[0] == counts[1] != [], "some reason of a skip is not counted"


def test_the_record_counts_each_test_of_a_gpu_and_says_why_it_was_skipped(tmp_path: Path) -> None:
    def reports(file: str, count: int, why: str = "") -> list[SimpleNamespace]:
        return [SimpleNamespace(nodeid=f"tests/gpu/{file}::test", longrepr=("", 1, why))] * count

    found = {"passed": reports("test_a.py", 2), "failed": reports("test_b.py", 1), "deselected": [object()]}
    found["skipped"] = reports("test_b.py", 3, "Skipped: needs two CUDA devices")
    made = dict(device="a card", driver="CUDA 1", cpu="x", python="3", versions={"torch": "2"}, commit="a")
    gpu_record.write(found, made, tmp_path)
    kept = json.loads((tmp_path / "gpu_tests.json").read_text("utf-8"))
    assert kept["files"] == {"tests/gpu/test_a.py": {"passed": 2}, "tests/gpu/test_b.py": {"failed": 1, "skipped": 3}}
    page = (tmp_path / "gpu_tests.md").read_text("utf-8")
    assert all(words in page for words in ("| all | 2 | 1 | 0 | 3 |", "* 3 × needs two CUDA devices", "commit a."))
