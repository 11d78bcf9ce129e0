"""Code in pages of documentation: its blocks, what they need, and the commands that they name."""

import importlib.util
import os
import re
import shlex
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch

from .source_tree import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = frozenset({"datasets", "evaluate", "lm_eval", "peft", "sentence_transformers", "trl", "matplotlib"})
"""Optional packages that a block may say it needs."""
NONE = ("no candidate within the budget", "the first candidate failed")
"""What a calibration says that finds no plan."""
BLOCK = re.compile(
    r"^(?P<indent>[ ]*)(?:<!-- (?P<mark>needs: [^>]*|run) -->\n\s*)?```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str  # python, bash, …
    code: str  # without the indentation of the fence
    needs: str  # what a comment `<!-- needs: cuda -->` above it names; empty if it runs anywhere
    run: bool  # a comment `<!-- run -->` stands above it: a shell block that the tests execute


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        indent, mark = len(match["indent"]), match["mark"] or ""
        code = "".join(line[indent:] if line.strip() else "\n" for line in match["code"].splitlines(keepends=True))
        needs = mark.partition(":")[2].strip() if mark.startswith("needs:") else ""
        found.append(Block(match["language"], code, needs, mark == "run"))
    return found


def lacking(needs: str) -> str:
    """Why a block cannot run here; empty if it can. A need that nobody knows would skip its block for ever."""
    known = {
        "cuda": (torch.cuda.is_available(), "no CUDA device"),
        "two cuda devices": (torch.cuda.device_count() > 1, "fewer than two CUDA devices"),
        "network": (os.environ.get("HF_HUB_OFFLINE") != "1", "no network (HF_HUB_OFFLINE=1)"),
    }
    for need in filter(None, (part.strip() for part in needs.split(","))):
        if need not in known and need not in PACKAGES:
            raise ValueError(f"needs: got {need!r}, expected one of {', '.join([*known, *sorted(PACKAGES)])}")
        there, why = known.get(need) or (importlib.util.find_spec(need), f"the package {need} is not installed")
        if not there:
            return why
    return ""


def heard(shown: str, printed: str) -> float:
    """Share of the words of a page that were printed in that order; figures are a machine's own."""
    page, here = (re.findall(r"[A-Za-z]{3,}", text) for text in (shown, printed))
    matches = SequenceMatcher(None, page, here, autojunk=False).get_matching_blocks()
    return sum(match.size for match in matches) / len(page)


def why_none(text: str) -> list[str]:
    """Why a calibration said that it finds no plan, which is the machine's to say; empty if it did not say so."""
    return [words for words in NONE if words in " ".join(text.split())]


def command_lines(text: str, program: str) -> list[list[str]]:
    """Words of every line of the shell blocks that calls a program; continued lines are one, comments are left out."""
    found = []
    for block in blocks(text):
        if block.language in ("bash", "sh"):
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"\w+=\S*", words[0]):
                    words = words[1:]
                if words and words[0] == program:
                    found.append(words)
    return found
