"""What is built and installed: the right files, under the right names, working from anywhere."""

import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from ..support.installing import checkout_files, copy_checkout, environment, install, run
from ..support.source_tree import MAPPED, ROOT

pytestmark = pytest.mark.slow

# Run in a fresh environment, from a directory that is not the checkout.
WORKS = """
import importlib, importlib.util, pathlib, sys
import torch, transformers
import adaattn_hf
for name in ("adaattn_hf.patches", "adaattn_hf.configs", "adaattn_hf.eval", "adaattn_hf.stats", "adaattn_hf.backends"):
    importlib.import_module(name)
assert "exact" in adaattn_hf.preset_names(), adaattn_hf.preset_names()
for name in adaattn_hf.preset_names():
    assert adaattn_hf.load_preset(name).preset == name
for name in {closed!r}:
    assert importlib.util.find_spec(name) is None, f"{{name}} is importable at the top level"
sizes = dict(vocab_size=8, n_embd=8, n_layer=1, n_head=2, n_positions=8)
config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="adaattn")
assert torch.isfinite(model(input_ids=torch.arange(6)[None]).logits).all()
print(pathlib.Path(adaattn_hf.__file__).parent)
print(pathlib.Path(importlib.import_module("adaattn_hf.patches").__file__).parent)
"""
CLOSED = ("patches", "configs", "eval", "tests")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the sdist and of the wheel that was built from the sdist."""
    source = copy_checkout(tmp_path_factory.mktemp("source"), with_tests=True)
    target = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", target, source], cwd=target)
    return target


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, which was built without a compiler."""
    python = environment(tmp_path_factory.mktemp("installed") / "venv")
    install(python, wheel)
    return python


def mapped_name(name: str) -> str | None:
    top, _, rest = name.partition("/")
    return f"{MAPPED[top].replace('.', '/')}/{rest}" if top in MAPPED else None


def test_every_package_is_listed() -> None:
    """setuptools finds nothing by itself where directories are mapped."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = set()
    for name in checkout_files():
        target = mapped_name(name)
        if target is not None and name.endswith("/__init__.py"):
            present.add(target.removesuffix("/__init__.py").replace("/", "."))
    assert listed == present


def test_wheel_holds_every_file_of_the_mapped_directories_and_nothing_else(wheel: Path) -> None:
    expected = {target for name in checkout_files() if (target := mapped_name(name)) is not None}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    # says that no compiler was found, instead of the library
    assert held - expected == {"adaattn_hf/backends/native/build_report.json"}
    assert expected - held == set()


def test_wheel_says_what_it_needs_and_carries_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in text
    for requirement in ("torch>=", "transformers<5.25,>=5.17", "typer>=", "pyyaml"):
        assert f"Requires-Dist: {requirement}" in text, requirement
    assert "adaattn = adaattn_cli:main" in entry_points
    assert "[lm_eval.models]\nadaattn = adaattn_hf.eval.lm_eval_model:AdaAttnLM" in entry_points
    assert re.findall(r"\]\((?!https?://|#)[^)]+\)", text) == [], "a link of the README that is dead on the index"
    assert wheel.name.endswith("-py3-none-any.whl"), "without the native library the wheel is for every platform"


def test_the_index_would_take_both(built: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed")
    files = sorted(path for path in built.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    assert len(files) == 2
    said = run([sys.executable, "-P", "-m", "twine", "check", "--strict", *files], cwd=built)
    assert said.count("PASSED") == 2


def test_sdist_holds_what_a_packager_needs(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = {name for name in checkout_files() if name.partition("/")[0] in (*MAPPED, "tests")}
    needed |= {"pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints-dev.txt"}
    assert needed - names == set()
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".venv", "build"))]


def test_what_an_earlier_build_left_is_in_no_later_one(tmp_path: Path) -> None:
    source, build = copy_checkout(tmp_path / "source"), [sys.executable, "setup.py", "-q", "build"]
    run(build, cwd=source)
    (place,) = source.glob("build/lib*")
    first = {path for path in place.rglob("*") if path.is_file()}
    for name in ("libadaattn.so", "gone.py", ".build.killed/portable.o"):
        path = place / "adaattn_hf" / "backends" / "native" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run(build, cwd=source)
    assert {path for path in place.rglob("*") if path.is_file()} == first
    (source / "adaattn_hf" / "note").touch()
    run([*build, "--build-lib", "."], cwd=source)
    assert (source / "adaattn_hf" / "note").exists()


def test_installed_wheel_works_from_anywhere(installed: Path, tmp_path: Path) -> None:
    package, patches = run([installed, "-c", WORKS.format(closed=CLOSED)], cwd=tmp_path).split()
    assert Path(package).is_relative_to(installed.parents[1])
    assert Path(patches) == Path(package) / "patches"
    assert "explain" in run([installed.parent / "adaattn", "--help"], cwd=tmp_path)
    assert "works" in run([installed, ROOT / "tests" / "packaging" / "smoke.py"], cwd=tmp_path)


def test_smoke_fails_without_the_kernels_that_it_is_asked_for(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="native"):
        run([installed, ROOT / "tests" / "packaging" / "smoke.py", "--native"], cwd=tmp_path)


def test_editable_install_works_from_anywhere_and_sees_edits(tmp_path: Path) -> None:
    source = copy_checkout(tmp_path / "source")
    python = environment(tmp_path / "venv")
    install(python, "-e", source)
    face = source / "patches" / "__init__.py"
    face.write_text(face.read_text() + "\nEDITED = 1\n")
    (source / "eval" / "added.py").write_text('"""A module that was not there when the package was installed."""\n')
    code = WORKS.format(closed=CLOSED) + "import adaattn_hf.eval.added\nassert adaattn_hf.patches.EDITED == 1\n"
    package, patches = run([python, "-c", code], cwd=tmp_path).split()
    assert Path(package) == source / "adaattn_hf"
    assert Path(patches) == source / "patches"
    at_the_root = "import adaattn_hf.patches, adaattn_hf.eval.added; print(adaattn_hf.patches.__file__)"
    assert run([python, "-c", at_the_root], cwd=source).strip() == str(source / "patches" / "__init__.py")


@pytest.mark.parametrize("beside", [False, True], ids=["nothing installed", "a copy installed"])
def test_a_python_started_in_the_checkout_runs_its_source(
    beside: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = copy_checkout(tmp_path / "source")
    python = request.getfixturevalue("installed") if beside else environment(tmp_path / "venv")
    code = """
import adaattn_hf, adaattn_hf.configs, adaattn_hf.eval, adaattn_hf.patches.prepare, transformers, torch
config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="adaattn")
assert torch.isfinite(adaattn_hf.prepare(model)(input_ids=torch.arange(6)[None]).logits).all()
print(adaattn_hf.__file__, adaattn_hf.patches.__file__, adaattn_hf.eval.__file__)
"""
    expected = [str(source / name / "__init__.py") for name in ("adaattn_hf", "patches", "eval")]
    assert run([python, "-c", code], cwd=source).split() == expected
    assert run([python, "-m", "adaattn_hf", "--version"], cwd=source).startswith("adaattn")
    strict = [python, "-W", "error:adaattn:UserWarning", "-c", "import adaattn_hf"]
    with pytest.raises(AssertionError, match=r"has no CPU kernels, so torch's are used; compile them with `python -m"):
        run(strict, cwd=source)
    (source / "adaattn_hf" / "backends" / "native" / "build_report.json").write_text("{}", encoding="utf-8")
    run(strict, cwd=source)
    below = "import adaattn_hf.patches; print(adaattn_hf.__path__, adaattn_hf.patches.__file__)"
    if beside:
        found = run([python, "-c", below], cwd=tmp_path)
        assert str(source) not in found
        assert found.count(str(python.parents[1])) == 2
