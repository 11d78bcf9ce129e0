"""Assembles a directory in which Transformers' own model tests run against the installed Transformers.

The tests are third-party and no part of this project. Per-model tests come from a checkout of Transformers,
the shared mixins from the source distribution of the installed version (it has no per-model tests).
"""

import argparse
import ast
import io
import re
import shutil
import subprocess
import tarfile
from importlib import metadata, util
from pathlib import Path

DECLARED = Path(__file__).parent / "declared"
HELPERS = (
    "run_distributed", "_get_distributed_backend", "_get_distributed_device_type", "_get_rank_device",
    "_set_rank_device", "_start_rank_processes",
)  # fmt: skip
INI = """[pytest]
addopts = -p no:cacheprovider -p no:xdist --import-mode=prepend
filterwarnings = ignore
"""


def prepare(checkout: Path, sdist: Path, out: Path) -> None:
    """Fill `out` with `tests/` of a checkout and of the source distribution, a link to the sources, a configuration."""
    installed = metadata.version("transformers")
    if installed not in sdist.name:
        raise ValueError(f"sdist: got {sdist.name}, expected the source distribution of {installed}, as installed")
    out.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(
        ["git", "-C", str(checkout), "archive", "HEAD", "tests", "utils"], check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(out, filter="data")
    with tarfile.open(sdist) as tar:
        for member in tar.getmembers():
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                source = tar.extractfile(member)
                if source is not None:
                    (out / "tests" / parts[2]).write_bytes(source.read())
    helpers = out / "tests" / "distributed_testing_utils.py"
    if not helpers.exists():
        # not in the source distribution; the tests that use them need several devices
        helpers.write_text("".join(f"{name} = None\n" for name in HELPERS))
    name_what_is_missing(out / "tests", "test_tensor_parallel_mixin")
    lend_constants(out / "tests", checkout)
    shutil.copytree(
        DECLARED, out / "tests" / "models", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    for conftest in (out / "conftest.py", out / "tests" / "conftest.py"):
        conftest.unlink(missing_ok=True)
    (out / "pytest.ini").write_text(INI)
    spec = util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ValueError("transformers: not installed")
    link = out / "src" / "transformers"
    link.parent.mkdir(exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(Path(spec.origin).parent)


def name_what_is_missing(tests: Path, mixin: str) -> None:
    """Define as None what per-model tests import from a shared module of another version, which lacks it."""
    # the tests that would call it need several devices, and are not selected
    file = tests / f"{mixin}.py"
    content = file.read_text()
    wanted: set[str] = set()
    for path in tests.glob("models/*/test_modeling_*.py"):
        for names in re.findall(rf"from \.\.\.{mixin} import (?:\(([^)]*)\)|(.*))", path.read_text(), re.MULTILINE):
            wanted |= {name.split(" as ")[0].strip() for part in names for name in part.split(",")} - {""}
    missing = sorted(name for name in wanted if not re.search(rf"\b{name}\b", content))
    file.write_text(content + "".join(f"{name} = None\n" for name in missing))


def lend_constants(tests: Path, checkout: Path) -> None:
    """Give `transformers.testing_utils` the tables of the checkout, which its tests import, where it lacks them."""
    show = ["git", "-C", str(checkout), "show", "HEAD:src/transformers/testing_utils.py"]
    body = ast.parse(subprocess.run(show, check=True, stdout=subprocess.PIPE, text=True).stdout).body
    found = {
        one.targets[0].id: one.value for one in body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Dict)
    }
    lines = [f"vars(testing_utils).setdefault({name!r}, {ast.unparse(value)})\n" for name, value in found.items()]
    with open(tests / "__init__.py", "a", encoding="utf-8") as file:
        file.writelines(["from transformers import testing_utils\n", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="checkout (or git directory)")
    parser.add_argument("--sdist", type=Path, required=True, help="transformers-X.Y.Z.tar.gz")
    parser.add_argument("out", type=Path, help="directory to create")
    args = parser.parse_args()
    prepare(args.checkout, args.sdist, args.out)


if __name__ == "__main__":
    main()
