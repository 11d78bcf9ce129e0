"""Three tiny models and a text sample that come with the package, so that it can be tried and tested offline.

The models and the sample are data beside this file, in directories that are not packages; `studies/demo`
made them, which git has at commit 6ebd7cc.
"""

import json
from importlib import resources
from pathlib import Path

from adaattn_hf.errors import unknown

_SAMPLE = "text-sample"


def _data(*parts: str) -> Path:
    path = resources.files(__name__).joinpath(*parts)
    if not isinstance(path, Path) or not path.exists():
        raise FileNotFoundError(
            f"demo data: {path} is not a file, expected the installed package's: "
            "install adaattn-hf from its wheel or sdist, unzipped"
        )
    return path


DEMO_MODELS = ("gpt2", "llama", "bert")


def demo_model_path(name: str) -> Path:
    """Directory of a demo model, for `from_pretrained`.

    Args:
        name: `gpt2`, `llama` or `bert`.

    Raises:
        ValueError: There is no demo model of that name.
    """
    if name not in DEMO_MODELS:
        raise ValueError(unknown("demo model", name, DEMO_MODELS))
    return _data(f"model-{name}")


def _lines(filename: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in _data(_SAMPLE, filename).read_text(encoding="utf-8").splitlines()]


def pages_path(split: str) -> Path:
    """File of the packaged pages to `calibrate` on or to prove on: `calibration` or `heldout`, a `.jsonl`."""
    return _data(_SAMPLE, f"{split}.jsonl")


def heldout_pages() -> list[str]:
    """Pages of text that no demo model was trained or chosen on, each a heading and prose."""
    return [record["text"] for record in _lines("heldout.jsonl")]


def calibration_pages() -> list[str]:
    """Pages to calibrate on: no gradient came from them; the demo models' checkpoints were chosen on them."""
    return [record["text"] for record in _lines("calibration.jsonl")]


def lastword_items() -> list[dict[str, str]]:
    """Held-out passages whose last word their context has used before: records with `text` and `document`."""
    return _lines("lastword.jsonl")
