"""The documentation site: it builds without a warning and a network, loads nothing from elsewhere, and is complete."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import adaattn_hf
from adaattn_cli.pictures.page import page

from ..support.source_tree import ROOT, read_modules
from ..unit.test_plan_page import embedded

GENERATED = {"changelog.md", "contributing.md", "overview.md", "reference/commands.md"}
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preload|preconnect)[^>]*//"""
)
"""What a page would load from elsewhere."""


def navigation(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from navigation(value)
    elif isinstance(entry, list):
        for value in entry:
            yield from navigation(value)


def settings() -> dict[str, object]:
    return dict(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8")))


def test_every_page_is_in_the_navigation_and_exists() -> None:
    named = list(navigation(settings()["nav"]))
    assert len(named) == len(set(named))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    notebook = {page for page in pages if page.startswith("results/") and page != "results/index.md"}
    assert set(named) == pages - notebook | GENERATED
    index = (ROOT / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+\.md)\)", index)) == sorted(page.removeprefix("results/") for page in notebook)


def test_every_guide_is_on_the_home_page() -> None:
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    guides = {f"guides/{path.name}" for path in (ROOT / "docs" / "guides").glob("*.md")}
    assert set(re.findall(r"\((guides/[\w-]+\.md)\)", home)) == guides


@pytest.mark.parametrize("name", ["explorer", "explorer_smollm2"])
def test_the_explorers_are_drawn_by_the_present_code(name: str) -> None:
    shown = (ROOT / "docs" / "assets" / f"{name}.html").read_text(encoding="utf-8")
    data = embedded(shown)
    assert page(data) == shown, f"the page's template has changed: make {name.replace('_', '-')}"
    assert any(stop["proof"] for stop in data["stops"]), "no plan was proved"


def test_every_public_name_has_a_place_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert set(adaattn_hf.__all__) - described - {"__version__"} == set()


def test_the_glossary_is_in_order_and_says_each_word_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [word.strip(" `").lower() for word in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)][1:]
    assert len(words) == len(set(words)) > 35
    assert words == sorted(words)
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "glossary.md"]
    used = " ".join(path.read_text(encoding="utf-8") for path in [*pages, *ROOT.glob("*.md")]).lower()
    used += " ".join(module.path.read_text(encoding="utf-8") for module in read_modules().values()).lower()
    used = " ".join(used.replace("_", " ").split())
    plain = [re.sub(r" \(.*", "", part.strip()) for word in words for part in word.split(",")]
    assert [word for word in plain if word.replace("_", " ") not in used] == []


def test_what_is_loaded_from_elsewhere_is_found() -> None:
    assert LOADED.search('<script src="https://unpkg.com/x.js"></script>')
    assert LOADED.search("<script src=//cdn.example/x.js></script>")
    assert LOADED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert not LOADED.search('<a href="https://example.org">there</a><script src="assets/x.js"></script>')


@pytest.mark.slow
def test_the_site_builds_strictly_and_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    python = [sys.executable, "-P", "-m"]
    described = tmp_path / "described"
    install = ["pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(described), str(ROOT)]
    environment = {**os.environ, "CXX": "no-compiler", "NO_MKDOCS_2_WARNING": "1", "PIP_NO_INDEX": "1"}
    subprocess.run([*python, *install], env=environment, check=True, capture_output=True, timeout=300)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "paths: [build/described]" in config
    (tmp_path / "mkdocs.yml").write_text(
        config.replace("[build/described]", f"[{described}]")
        .replace("docs_dir: docs", f"docs_dir: {ROOT / 'docs'}")
        .replace("site_dir: build/site", f"site_dir: {tmp_path / 'site'}")
        .replace("hooks: [docs/_hooks.py]", f"hooks: [{ROOT / 'docs' / '_hooks.py'}]")
    )
    done = subprocess.run(
        [*python, "mkdocs", "build", "--strict", "-f", str(tmp_path / "mkdocs.yml")], env=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if LOADED.search(page.read_text(encoding="utf-8"))] == []
    front = (tmp_path / "site" / "overview.html").read_text(encoding="utf-8")
    assert "https://github.com/adaattn/adaattn-hf" in front
    headings = re.findall(r"^## (.+)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"<h2[^>]*>([^<]+)<", front) == headings, "the README"
    assert 'src="assets/speed.svg"' in front
    assert 'data-md-component="source"' not in front, "the theme's script would ask github.com for stars"
    reference = (tmp_path / "site" / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("prepare", "explain", "GrowingCache"):
        assert f">{name}<" in reference or f".{name}" in reference
    supported = (tmp_path / "site" / "supported.html").read_text(encoding="utf-8")
    served, refused = supported.split('id="not-supported"')
    for name, part in (("llama", served), ("modernbert", served), ("deberta-v2", refused), ("falcon", refused)):
        assert f"<code>{name}</code>" in part
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
    assert "--verify-data" in commands
