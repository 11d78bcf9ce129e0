"""Evaluation over a cache: windows are read in pieces, and the loss of what a cache stores is measured."""

from typing import Any

import pytest

from adaattn_hf.errors import UsageError
from adaattn_hf.eval import report, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint

from .conftest import OWN_PAGES


def evaluated(loaded: checkpoint.Checkpoint, cache: str | None, **more: Any) -> dict[str, Any]:
    return runner.evaluate(loaded, OWN_PAGES, Settings(cache=cache, cache_piece=7, **more))


def test_a_cache_of_numbers_costs_nothing_and_bytes_cost_little(loaded: checkpoint.Checkpoint) -> None:
    reports = {cache: evaluated(loaded, cache) for cache in ("model", "int8")}
    exact, eight = (reports[cache]["quality"]["comparisons"][0]["kl_mean"] for cache in ("model", "int8"))
    assert exact < 1e-9
    assert 1e-9 < eight < 1e-2
    page = report.markdown([reports["int8"]])
    assert ", cache int8\n" in page
    assert "* Cache: windows are read in pieces of 7 tokens, by the tested arm over an `AdaAttnCache` of int8" in page
    assert "Cache:" not in report.markdown([evaluated(loaded, None)])


@pytest.mark.parametrize(("given", "words"), [
    ({"cache": "int4"}, "cache: got 'int4'"), ({"cache": "int8", "padding": "left"}, "expected --padding none"),
    ({"cache": "int8", "cache_piece": 0}, "cache_piece: got 0"),
    ({"cache": "int8", "attn_implementation": "eager"}, "cannot read codes"),
])  # fmt: skip
def test_what_no_cache_can_measure_is_said(loaded: checkpoint.Checkpoint, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        runner.evaluate(loaded, OWN_PAGES, Settings(**given))
