"""The backend of docs/howto/backend.md: what it does not name it refuses, a quantised cache included."""

from typing import Any

import pytest
import torch

from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.kind import ONE_QUERY, OPTIONS
from adaattn_hf.attention.stored import StoredKV
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends import select

from ..contracts.test_source import undocumented
from ..support.pages import blocks
from ..support.source_tree import ROOT

(EXAMPLE,) = (
    block.code
    for block in blocks((ROOT / "docs" / "howto" / "backend.md").read_text(encoding="utf-8"))
    if block.language == "python"
)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> Any:
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    backend = names["DenseBackend"]()
    monkeypatch.setitem(select.BACKENDS, backend.name, backend)
    monkeypatch.setattr(select, "plain_kernels", {})
    return backend


def test_it_keeps_the_contract_of_docstrings() -> None:
    assert list(undocumented(EXAMPLE)) == []


def test_a_quantised_cache_is_refused_by_name(dense: Any) -> None:
    codes, scales = torch.ones(1, 2, 6, 8, dtype=torch.int8), torch.full((1, 2, 6), 100, dtype=torch.uint8)
    structure, stored = MaskStructure(1, 6, 6, causal=True), StoredKV(scales, scales)
    query = torch.randn(1, 4, 6, 8)
    call = AttentionCall(query, codes, codes, structure, scaling=1.0, stored=stored)
    with pytest.raises(select.BackendRefusal, match="dense calls have no keys and values stored as codes"):
        select.attend(call, dense.name)
    assert select.attend(call).out.shape == (1, 6, 4, 8)


def test_an_option_of_later_days_is_refused(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 2, 1, 4)
    spec = AttentionCall(x, x, x, MaskStructure(1, 1, 1), scaling=1.0).checked_kind()
    assert dense.refusals(spec) == ()
    monkeypatch.setitem(OPTIONS, ONE_QUERY, "planted option")
    assert dense.refusals(spec) == ("dense calls have no planted option",)
