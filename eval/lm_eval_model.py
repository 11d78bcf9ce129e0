"""The model `adaattn` of lm-evaluation-harness; importing this module registers it."""

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import adaattn_hf  # noqa: F401  (its import registers the attention)
from adaattn_hf.patches.checkpoint import give_plan

NAME = "adaattn"


@register_model(NAME)
class AdaAttnLM(HFLM):  # type: ignore[misc]
    """lm-evaluation-harness's Hugging Face model with `attn_implementation="adaattn"`."""

    def __init__(
        self, pretrained: Any, attn_implementation: str = "adaattn", plan: str | None = None, **kwargs: Any
    ) -> None:
        """Load a model by hub id or directory, or take one that is loaded, whose attention is then switched.

        `plan` is a file or directory, or `none` to run without the one that the model carries; `kwargs` as for `hf`.
        """
        if isinstance(pretrained, str):
            super().__init__(pretrained=pretrained, attn_implementation=attn_implementation, **kwargs)
        else:
            pretrained.set_attn_implementation(attn_implementation)
            super().__init__(pretrained=pretrained, **kwargs)
        give_plan(self.model, plan)
