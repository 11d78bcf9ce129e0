"""What `hub/build.py` makes: the package's own files, nothing else, told apart from every other build."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support.kernels import CPU, ROOT

NAMES = [path.parent.name for path in sorted(ROOT.glob("hub/*/build.toml"))]


def copies(builder: dict[str, Any], name: str, directory: Path) -> dict[str, bool]:
    """Per module of a built package, whether it is the source's file, byte for byte but for imports of `patches/`."""
    modules, copy_of = builder["package_modules"](name), builder["copy_of"]
    return {inside: (directory / inside).read_bytes() == copy_of(inside, path) for inside, path in modules.items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_module_is_a_file_of_the_source(builder: dict[str, Any], repositories: Path, name: str) -> None:
    for directory in (repositories / name / "build").iterdir():
        same = copies(builder, name, directory)
        assert all(same.values())
        assert "backends/native/launch.py" in same
        built = {path.relative_to(directory).as_posix() for path in directory.rglob("*.py")}
        assert built == set(same)


@pytest.mark.parametrize("name", NAMES)
def test_copies_differ_from_the_source_in_imports_alone(builder: dict[str, Any], name: str) -> None:
    for inside, path in builder["package_modules"](name).items():
        source, copy = path.read_text().splitlines(), builder["copy_of"](inside, path).decode().splitlines()
        changed = [pair for pair in zip(source, copy, strict=True) if pair[0] != pair[1]]
        above = "from " + "." * len(Path(inside).parts)
        assert all(old.replace("from adaattn_hf.", above, 1) == new for old, new in changed)
        assert not changed or inside.startswith("patches/")


def test_a_changed_copy_is_seen(builder: dict[str, Any], repositories: Path, tmp_path: Path) -> None:
    (directory,) = (repositories / "flash-adaattn" / "build").glob(CPU)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "backends" / "native" / "launch.py").open("a") as file:
        file.write("\n")
    changed = [inside for inside, same in copies(builder, "flash-adaattn", tmp_path).items() if not same]
    assert changed == ["backends/native/launch.py"]


@pytest.mark.parametrize("line", ["import numpy", "from adaattn_hf.config import settings_in", "from .... import x"])
def test_an_import_that_leads_out_is_refused(builder: dict[str, Any], tmp_path: Path, line: str) -> None:
    module = tmp_path / "call.py"
    module.write_text(f"def later():\n    {line}\n")
    with pytest.raises(builder["BuildError"], match="import"):
        list(builder["imports"]("backends/native/launch.py", module))


@pytest.mark.parametrize("name", NAMES)
def test_a_process_with_the_kernel_holds_nothing_of_the_package_or_transformers(repositories: Path, name: str) -> None:
    (directory,) = (repositories / name / "build").glob(CPU)
    code = (
        "import importlib.util, sys\n" "import torch\n"
        f"spec = importlib.util.spec_from_file_location('_kernel', {str(directory / '__init__.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n" "sys.modules['_kernel'] = module\n"
        "spec.loader.exec_module(module)\n" "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(tops & {'adaattn_hf', 'transformers', 'huggingface_hub', 'safetensors', 'flash_attn'}))\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_metadata_says_what_the_files_are(repositories: Path, name: str) -> None:
    unique = set()
    for directory in (repositories / name / "build").iterdir():
        metadata = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
        assert metadata["name"] == name
        assert metadata["python-depends"] == []
        assert metadata["backend"]["type"] == ("cuda" if directory.name == "torch-cuda" else "cpu")
        assert metadata["id"].isidentifier()
        unique.add(metadata["id"])
        files = metadata["digest"]["files"]
        found = {
            str(path.relative_to(directory)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
            for path in directory.rglob("*")
            if path.is_file() and path.name != "metadata.json" and "__pycache__" not in path.parts
        }
        assert files == found
        assert any(file.endswith(".so") for file in files) == (directory.name != "torch-cuda")
    assert len(unique) == 2


def test_the_card_shows_what_was_measured(repositories: Path) -> None:
    card = (repositories / "flash-adaattn" / "CARD.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "results" / "hub_kernel.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| BERT batch")]
    assert len(rows) == 1
    assert rows[0] in card.splitlines()
    assert "<!-- figures -->" not in card


def test_another_source_is_another_name(builder: dict[str, Any], repositories: Path, tmp_path: Path) -> None:
    (directory,) = (repositories / "flash-adaattn" / "build").glob(CPU)
    before = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))["id"]
    (tmp_path / "__init__.py").write_text('"""Another one."""\n')
    builder["_write_metadata"]("flash-adaattn", "cpu", tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text(encoding="utf-8"))["id"] != before


def test_a_library_for_new_systems_alone_is_seen(builder: dict[str, Any]) -> None:
    assert builder["newer_symbols"](b"GLIBC_2.28\0GLIBCXX_3.4.24\0CXXABI_1.3") == []
    assert builder["newer_symbols"](b"GLIBC_2.34\0GLIBCXX_3.4.9\0") == ["GLIBC_2.34"]


def test_an_unknown_kernel_is_refused_by_name(capsys: pytest.CaptureFixture[str], builder: dict[str, Any]) -> None:
    with pytest.raises(SystemExit):
        builder["main"](["flash-atention"])
    assert "expected one of" in capsys.readouterr().err
