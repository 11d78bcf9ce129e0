"""What every test starts from: offline, one thread, one seed; and the reasons why a test may be skipped."""

import gc
import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# before anything imports the libraries that read them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")  # as the command line sets it before tqdm is imported
# of the processes that tests start, as of this one below: threads of many that wait for one another spin
os.environ.setdefault("OMP_NUM_THREADS", "1")
# those of workflows and terminals, which put codes of colours and ends of lines between the words of help
os.environ.pop("GITHUB_ACTIONS", None)
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("PY_COLORS", None)
os.environ.pop("COLUMNS", None)
if not Path("/dev/nvidiactl").exists():
    # without a device Triton's kernels run in its interpreter, which is decided when triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from .support.warm import WarmInterpreter

ROOT = Path(__file__).resolve().parent.parent

# The same examples every time, so that red stays red. `--hypothesis-profile=search` looks for new ones.
settings.register_profile(
    "suite", max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
settings.register_profile("search", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("suite")

# Tests run side by side in processes, and almost all tensors here are tiny.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-snapshots` records what is, instead of comparing with it; `--require-gpu` fails where there is none."""
    parser.addoption("--write-snapshots", action="store_true", help="record public API and error messages anew")
    parser.addoption("--require-gpu", action="store_true", help="fail where tests want a CUDA device in vain")
    parser.addoption("--gpu-record", type=Path, help="with --require-gpu: directory for a record of the GPU tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is run by the native kernels, by a parameter or the mark `native`, where they were not built."""
    from adaattn_hf.backends.native.library import missing

    for item in items if missing() else ():
        of = getattr(item, "callspec", None)
        named = {value for value in of.params.values() if isinstance(value, str)} if of is not None else set()
        if item.get_closest_marker("native") or named & {"native", "adaattn_native"}:
            item.add_marker(pytest.mark.skip(reason="; ".join(missing())))


def pytest_collection_finish() -> None:
    """Leaves what was imported and collected out of the garbage collector's rounds, and lets it make few of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # of 700 objects each, which took a third of the time that torch's tracers take


def gpu_reports(config: pytest.Config) -> dict[str, list[Any]]:
    """Of tests marked `gpu`, the reports by outcome, as the process that reports knows; empty in the others."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    every = reporter.stats.items() if reporter is not None else ()
    return {outcome: [one for one in many if "gpu" in getattr(one, "keywords", ())] for outcome, many in every}


def blocked(config: pytest.Config) -> int:
    """Tests that need a CUDA device and were skipped where there is none, for whichever reason."""
    return 0 if torch.cuda.is_available() else len(gpu_reports(config).get("skipped", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A suite for a GPU that ran nothing is not green where a GPU was asked for; one that ran may leave a record."""
    if not session.config.getoption("--require-gpu"):
        return
    directory, found = session.config.getoption("--gpu-record"), gpu_reports(session.config)
    if blocked(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif directory is not None and found:
        from adaattn_hf.eval.provenance import provenance

        from .support.gpu_record import write

        write(found, provenance(torch.device("cuda")), directory)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    count = blocked(terminalreporter.config)
    if count:
        terminalreporter.write_line(f"BLOCKED: {count} GPU tests")


def assets_directory() -> Path:
    """Real models and texts: named by `ADAATTN_ASSETS`, else `shared/assets` beside the checkout."""
    named = os.environ.get("ADAATTN_ASSETS")
    if named and not Path(named).is_dir():
        raise pytest.UsageError(f"ADAATTN_ASSETS: got {named!r}, expected a directory of models and texts")
    return Path(named) if named else ROOT.parent / "shared" / "assets"


def network_allowed() -> bool:
    """Whether `ADAATTN_NETWORK` says so: 1, by default 0."""
    from adaattn_hf.errors import from_environment

    return from_environment("ADAATTN_NETWORK", ("0", "1"), "0") == "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, each with its reason."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("network") and not network_allowed():
        pytest.skip("needs a network connection; set ADAATTN_NETWORK=1 to run it")
    if item.get_closest_marker("assets") and not assets_directory().is_dir():
        pytest.skip(f"needs real models and texts in {assets_directory()}; name the directory by ADAATTN_ASSETS")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def bulk_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernels read keys and values by TMA in calls of any size."""
    if importlib.util.find_spec("triton") is not None:
        monkeypatch.setattr("adaattn_hf.backends.triton.forward._LEAST_PRODUCTS", 0)


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmInterpreter]:
    """Runs programs, each as the first one of its process, in whichever directory it is told."""
    with WarmInterpreter(tmp_path_factory.mktemp("printed")) as warm:
        yield warm


@pytest.fixture
def assets() -> Path:
    return assets_directory()


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with a recorded file, or records it."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--write-snapshots"):
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is not up to date; look at the difference, then run this test with --write-snapshots"
        )

    return compare


@pytest.fixture(scope="session")
def checkout() -> Path:
    return ROOT
