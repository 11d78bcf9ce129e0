"""Models as ONNX graphs compute what the model computes: on other text, and at other lengths."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaattn_hf.backends.native.library import missing
from adaattn_hf.backends.select import BackendRefusal

from ..support.models import VOCABULARY, OfTensors, fresh_pair

runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime, which `make venv` installs")
pytest.importorskip("onnxscript", reason="needs onnxscript, which `make venv` installs")

# the exporters warn of themselves, of torchvision and of each other
pytestmark = pytest.mark.filterwarnings("ignore")


def made(family: str, name: str = "adaattn") -> OfTensors:
    return OfTensors(family, fresh_pair(family, name).ours.requires_grad_(False))


def padded(rows: int, length: int, pads: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :pads] = 0
    return torch.randint(1, VOCABULARY, (rows, length)), mask


def export(model: nn.Module, path: Path, **options: Any) -> None:
    names = ["input_ids", "attention_mask"]
    with torch.no_grad():
        torch.onnx.export(model, padded(2, 12, 5), path, input_names=names, verbose=False, **options)


def differs(model: nn.Module, path: Path, rows: int, length: int, pads: int) -> float:
    """Largest difference at real tokens between a model and its graph, on tokens that neither has seen."""
    ids, mask = padded(rows, length, pads)
    given = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    found = torch.from_numpy(runtime.InferenceSession(path).run(None, given)[0])
    return float((found - model(ids, mask))[mask.bool()].abs().max())


@pytest.mark.parametrize(("family", "dynamo"), [("bert", True), ("llama", False), ("gpt2", False), ("bert", False)])
def test_an_exported_model_computes_what_the_model_computes(family: str, dynamo: bool, tmp_path: Path) -> None:
    model = made(family)
    export(model, tmp_path / "model.onnx", dynamo=dynamo)
    assert differs(model, tmp_path / "model.onnx", 2, 12, 3) < 1e-5


def test_rows_and_tokens_may_be_left_open(tmp_path: Path) -> None:
    model, open_ = made("llama"), {0: "rows", 1: "tokens"}
    shapes = {"input_ids": open_, "attention_mask": open_}
    export(model, tmp_path / "model.onnx", dynamo=True, dynamic_shapes=shapes)
    assert differs(model, tmp_path / "model.onnx", 3, 19, 4) < 1e-5


@pytest.mark.skipif(bool(missing()), reason="; ".join(missing()) or "present")
def test_native_kernels_asked_for_by_name_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("llama", "adaattn_native")
    with pytest.raises(BackendRefusal, match=r"torch\.jit\.trace sees nothing of what its kernels compute"):
        export(model, tmp_path / "model.onnx", dynamo=False)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)  # the exporter tries thrice before it says so
    with pytest.raises(BackendRefusal, match="ONNX has no operator for the native kernels"):
        torch.export.export(model, padded(2, 12, 5), strict=False)
