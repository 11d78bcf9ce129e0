"""The atlas: what `record` saw as one HTML page that needs no network, for the keyboard and for any eye."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


def page(recorded: Mapping[str, Any], title: str, about: str) -> str:
    """Returns the page.

    Args:
        recorded: `AttentionRecord.to_dict()` of a record that saw calls.
        title: Its heading.
        about: A sentence below it.
    """
    template = resources.files(__package__).joinpath("atlas.html").read_text(encoding="utf-8")
    data = json.dumps({**recorded, "title": title, "about": about}, allow_nan=False)
    # within a script element nothing but these characters could end the data
    return template.replace("/*DATA*/", data.replace("<", "\\u003c").replace("\u2028", "\\u2028"))
