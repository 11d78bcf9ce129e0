"""What the supported versions of torch and Transformers cannot do themselves."""

import pytest
import torch
import transformers as tf
from packaging.version import Version

OLD_TORCH = Version(torch.__version__) < Version("2.7")
needs_tracing = pytest.mark.skipif(OLD_TORCH, reason="torch before 2.7 traces no whole model, stock attention neither")
HERE = Version(tf.__version__)
PAGE = "page_size" if Version("5.18") <= HERE else "block_size"
"""How the settings of Transformers' engine name the tokens of a page."""


def since(version: str, reason: str) -> pytest.MarkDecorator:
    """Skips a test before this version of Transformers, for what is the matter there."""
    return pytest.mark.skipif(Version(version) > HERE, reason=reason)


since_5_23 = since("5.23", "no model cuts rows before its layers end, and there is no Inkling 2")


def skip_what_stock_cannot(name: str, cache: str = "dynamic") -> None:
    """Skip a generation that the installed versions get wrong under stock attention."""
    if name == "llama4-chunked" and cache == "static" and Version("5.20") > HERE:
        pytest.skip("Transformers 5.17 and 5.19 raise in create_chunked_causal_mask with a static cache")
    if name == "t5" and OLD_TORCH:
        pytest.skip("with torch before 2.7 stock eager departs from stock sdpa by 2e-2")
