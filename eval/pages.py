"""Pages from measured records: data set into a template, and names from outside that bring no markup of their own."""

import html
from collections.abc import Mapping
from importlib import resources
from typing import Any

from adaattn_hf._files import json_text, printable

_MARKUP = {ord(character): f"&#{ord(character)};" for character in "|<["}


def harmless(record: Any) -> Any:
    """A record whose texts, keys too, bring no tag, link or table cell of their own to a page, and stay on one line."""
    if isinstance(record, str):
        return printable(record).translate(_MARKUP)
    if isinstance(record, Mapping):
        return {harmless(key): harmless(value) for key, value in record.items()}
    return [harmless(value) for value in record] if isinstance(record, (list, tuple)) else record


def filled(package: str, name: str, data: Mapping[str, Any]) -> str:
    """An HTML page that needs no network: the one template, content of a package, and data whose `title` it bears."""
    parts = (resources.files(at).joinpath(one) for at, one in (("adaattn_hf.eval", "page.html"), (package, name)))
    template, content = (part.read_text(encoding="utf-8") for part in parts)
    template = template.replace("/*CONTENT*/", content.strip(), 1).replace(
        "/*TITLE*/", html.escape(printable(data["title"])), 1
    )
    text = json_text(data, separators=(",", ":"))
    # within a script element nothing but these characters could end the data
    return template.replace("/*DATA*/", text.replace("<", "\\u003c").replace("\u2028", "\\u2028"))


def atlas(recorded: Mapping[str, Any], title: str, about: str) -> str:
    """The atlas: what `record` saw on one page, for the keyboard and for any eye."""
    return filled("adaattn_hf.eval", "atlas.html", {**recorded, "title": title, "about": about})
