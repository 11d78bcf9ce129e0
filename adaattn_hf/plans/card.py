"""The model card of a plan: what a directory or repository that holds it tells people, in Markdown."""

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .._files import printable
from .limits import MODEL, verdict_of
from .wording import allowed

if TYPE_CHECKING:
    from .plan import Plan


def card(plan: "Plan", repository: str) -> str:
    """Returns the card of a directory or repository that holds a plan: whose it is, and what was verified."""
    model = printable(str(plan.protocol.get(MODEL, plan.model_type)))
    lengths = ", ".join(f"{length:,}" for length in plan.lengths) or "none"
    scoring = plan.protocol.get("scoring")
    masked = isinstance(scoring, Mapping) and "mask_share" in scoring
    auto = f"AutoModelFor{'Masked' if masked else 'Causal'}LM"
    of_hub = f"base_model: {json.dumps(model)}\n" if model.count("/") == 1 else ""
    return f"""---
library_name: adaattn-hf
{of_hub}tags:
- adaattn
- attention-plan
---

# A plan of attention for {model}

What each head of the model reads, and in which precision, within a budget of {allowed(plan.budget)} perplexity.
{printable(verdict_of(plan))}

* It speaks for up to {plan.max_length:,} tokens, and was measured at {lengths}; what is longer is computed exactly.
* It belongs to these weights in {printable(plan.dtype)}: other weights, dtypes and settings are refused.
* Its versions: adaattn-hf {printable(plan.adaattn)}, torch {printable(plan.torch)}, transformers
  {printable(plan.transformers)}.

```python
from transformers import {auto}

import adaattn_hf

model = {auto}.from_pretrained({model!r}, dtype={plan.dtype!r}, attn_implementation="adaattn")
adaattn_hf.load_plan(model, {repository!r})
```

To measure it on text of your own, beside stock attention:

```bash
adaattn eval {shlex.quote(model)} --plan {shlex.quote(repository)} --dtype {shlex.quote(plan.dtype)} --data TEXT
```
"""
