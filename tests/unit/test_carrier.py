"""The mask that is not a tensor answers like one."""

import copy

import pytest
import torch
from torch import Tensor

from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.patches.mask.structured_mask import StructuredMask

PADDING = torch.tensor([[True, True, True, True], [False, False, True, True]])


def mask(**rules: object) -> StructuredMask:
    structure = MaskStructure(2, 3, 4, causal=True, q_offset=1, key_padding=PADDING, **rules)  # type: ignore[arg-type]
    return StructuredMask(structure, torch.device("cpu"))


def written_out() -> Tensor:
    rows = [[[bool(PADDING[b, j]) and j <= i + 1 for j in range(4)] for i in range(3)] for b in range(2)]
    return torch.tensor(rows)[:, None]


def test_surface_of_a_tensor() -> None:
    carried = mask()
    dense = written_out()
    assert torch.equal(carried.dense(), dense)
    for name in ("shape", "ndim", "dtype", "device"):
        assert getattr(carried, name) == getattr(dense, name)
    assert (carried.dim(), carried.size()) == (dense.dim(), dense.size())
    assert [carried.size(i) for i in range(-4, 4)] == [dense.size(i) for i in range(-4, 4)]
    assert carried.contiguous() is carried


def test_computing_with_it_makes_it_dense() -> None:
    carried, dense = mask(), written_out()
    other = torch.rand(2, 1, 3, 4) > 0.5
    assert torch.equal(carried[:, :, -1:, :2], dense[:, :, -1:, :2])
    assert torch.equal(carried & other, dense & other)
    assert torch.equal(~carried, ~dense)
    assert torch.equal(torch.where(carried, 1.0, 0.0), dense.float())  # type: ignore[call-overload]
    assert torch.equal(torch.cat([carried, carried], dim=0), torch.cat([dense, dense], dim=0))  # type: ignore[list-item]
    assert torch.equal(carried.float(), dense.float())
    assert torch.equal(carried.sum(dim=3), dense.sum(dim=3))


@pytest.mark.parametrize("where", ["positional", "keyword", "like a tensor"])
def test_moving_moves_every_tensor_inside(where: str) -> None:
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    carried = mask(k_segments=documents, q_segments=documents[:, 1:])
    named = {"device": torch.device("meta"), "non_blocking": True} if where == "keyword" else {}
    place = {"positional": ("meta",), "like a tensor": (torch.empty(1, device="meta"),)}.get(where, ())
    moved = carried.to(*place, **named)
    assert moved.device.type == "meta"
    tensors = [value for value in vars(moved.structure).values() if isinstance(value, Tensor)]
    assert len(tensors) == 3
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert carried.device.type == "cpu"
    assert carried.structure.k_segments is documents


def test_a_dtype_does_not_change_a_mask() -> None:
    carried = mask()
    assert carried.to(dtype=torch.bool) is carried
    for given in ((torch.float16,), ("cpu",), (torch.float16, True), ("cpu", torch.bool, True, False)):
        assert carried.to(*given) is carried


def test_adding_it_to_scores_is_refused() -> None:
    """A model that computes attention by itself would add a boolean mask and be wrong in silence."""
    with pytest.raises(ValueError, match="load it with attn_implementation='eager'"):
        torch.randn(2, 1, 3, 4) + mask()
    with pytest.raises(ValueError, match="adds the attention mask to scores"):
        mask() + torch.randn(2, 1, 3, 4)


def test_dense_rows_of_padding_see_the_real_keys_as_in_stock_masks() -> None:
    carried = StructuredMask(MaskStructure(2, 4, 4, key_padding=PADDING), torch.device("cpu"))
    assert torch.equal(carried.dense(), PADDING[:, None, None, :].expand(2, 1, 4, 4))


def test_copies_and_unknown_attributes() -> None:
    carried = mask()
    assert torch.equal(copy.deepcopy(carried).dense(), written_out())
    with pytest.raises(AttributeError, match="_cheese"):
        carried._cheese  # noqa: B018
    with pytest.raises(AttributeError, match="cheese"):
        carried.cheese  # noqa: B018


def test_layers_of_another_device_share_what_was_moved() -> None:
    """accelerate moves the mask for each of them; the length of a preallocated cache grows, and is read each time."""
    padding = torch.ones(2, 6, dtype=torch.bool)
    carried = StructuredMask(MaskStructure(2, 6, 6, causal=True, key_padding=padding), torch.device("cpu"))
    assert carried.to("meta").structure is carried.to(torch.device("meta")).structure
    assert carried.to("meta").structure is not carried.structure
    grown = StructuredMask(MaskStructure(2, 1, 6, causal=True, q_offset=torch.tensor(3)), torch.device("cpu"))
    assert grown.to("meta").structure is not grown.to("meta").structure
