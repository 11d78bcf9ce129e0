"""lm-evaluation-harness with our attention: `--model adaattn`.

lm-evaluation-harness 0.4 has no entry point for outside models; its way is its registry, which has to be
filled before its command line is read. So run its command line through this module, with its own arguments:

    python -m adaattn_hf.eval.lm_eval_hook --model adaattn --model_args pretrained=MODEL --tasks
    wikitext,lambada_openai

or, in a program, `import adaattn_hf.eval.lm_eval_model` and then `lm_eval.simple_evaluate(model="adaattn",
…)`. Every argument of the model `hf` is understood; `attn_implementation` is `adaattn` unless it is given.
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

from . import lm_eval_model

NAME = lm_eval_model.NAME


def main() -> None:
    """lm-evaluation-harness's own command line, with the model `adaattn` known to it."""
    cli_evaluate()


if __name__ == "__main__":
    main()
