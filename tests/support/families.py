"""Tiny configurations of every family that is tested: `tests/model/breadth.yaml` and the usual sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
import yaml
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .models import Pair, build, sized

LISTED: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (Path(__file__).parents[1] / "model" / "breadth.yaml").read_text(encoding="utf-8")
)
ROUTED_SINCE = {"gptj": Version("5.24")}
"""Families that took no attention by its name before some version of Transformers."""
ROUTED = [family for family, since in ROUTED_SINCE.items() if Version(tf.__version__) >= since]
for _family in set(ROUTED_SINCE).difference(ROUTED):
    del LISTED["decoders"][_family]


def configured(model_type: str, changes: dict[str, Any]) -> tf.PreTrainedConfig:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} has no {model_type}")
    return sized(CONFIG_MAPPING[model_type], changes)


def models(model_type: str, changes: dict[str, Any], auto: Any, implementation: str = "adaattn") -> Pair:
    """The tiny model of a family, under stock eager attention and under ours, or another one that is named."""
    config = configured(model_type, changes)
    cls = auto._model_mapping[type(config)]
    return build(cls[0] if isinstance(cls, (list, tuple)) else cls, config, implementation)
