"""What the site shows besides `docs/`: pages of the root, the commands' options, and links.

The same files are read in a checkout, where `../BENCHMARKS.md` is right, and on the site, where that page lies beside
the others. Links that leave the site lead to the repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from adaattn_cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "overview.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files at the root -> pages of the site."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in `docs/`."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, ".", page, config.repo_url or "")))
    files.append(File.generated(config, "reference/commands.md", content="\n".join(command_pages())))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page in `docs/` lead to the site's pages, or to the repository."""
    source = page.file.src_uri
    if source in PAGES.values() or page.file.generated_by:
        return markdown
    return relinked(markdown, posixpath.join("docs", posixpath.dirname(source)), source, config.repo_url or "")


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Leave the repository's link without the theme's script, which would ask its host for stars at every visit."""
    return output.replace('data-md-component="source"', "")


def relinked(text: str, directory: str, page: str, repository: str) -> str:
    """A page's text, whose links are relative to `directory` of the checkout, with links as the site has them."""

    def replaced(match: re.Match[str]) -> str:
        opening, target, anchor, closing = (
            match.group(1),
            match.group(2),
            match.group(3) or "",
            match.group(4),
        )
        if "://" in target or target.startswith(("mailto:", "/")):
            return match.group(0)
        path = posixpath.normpath(posixpath.join(directory, target))
        if path in PAGES:
            path = f"docs/{PAGES[path]}"
        inside = path.startswith("docs/") and not path.endswith(".json") and (ROOT / path).suffix != ""
        if inside:
            here = posixpath.dirname(posixpath.join("docs", page))
            return f"{opening}{posixpath.relpath(path, here)}{anchor}{closing}"
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{opening}{repository}/{kind}/main/{path}{anchor}{closing}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def command_pages() -> Iterator[str]:
    """Markdown of every command: what it does, its arguments and options."""
    yield "# Command line\n\nWritten from the commands themselves; `adaattn COMMAND --help` says the same.\n"
    group: Any = typer.main.get_command(app)
    for name in group.list_commands(None):
        yield from described(group.commands[name], f"adaattn {name}", 2)


def described(command: Any, title: str, level: int) -> Iterator[str]:
    """One command, and the commands below it."""
    yield f"{'#' * level} `{title}`\n"
    yield re.sub(r"\n(?!\n)", " ", (command.help or "").replace("\n\n", "\0")).replace("\0", "\n\n") + "\n"
    rows = [row for parameter in command.params if (row := parameter_row(parameter))]
    if rows:
        yield "| argument or option | what it is | default |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    for child in getattr(command, "commands", {}).values():
        yield from described(child, f"{title} {child.name}", level + 1)


def parameter_row(parameter: Any) -> str:
    """One line of a command's table; empty for `--help`."""
    if parameter.name == "help":
        return ""
    is_option = parameter.param_type_name == "option"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts]) if is_option else parameter.name.upper()
    default = parameter.default
    shown = (
        "" if default in (None, (), False, "") or not isinstance(default, (str, int, float, Path)) else f"`{default}`"
    )
    if parameter.required:
        shown = "required"
    text = (getattr(parameter, "help", "") or "").replace("|", "\\|")
    return f"| `{names}` | {text} | {shown} |"
