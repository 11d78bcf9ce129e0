"""Transformers loads the kernel by its name alone: what it asks of the kernel, and what the models then answer."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..support.kernels import CPU
from .models import FAMILIES, FLASH, beside_stock, padded_batch

kernels = pytest.importorskip("kernels", reason="the package kernels is not installed; `make hub-test` has it")
tf = pytest.importorskip("transformers")

# what Transformers warns about is its own
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("local")]
TOLERANCE = dict(atol=2e-6, rtol=0.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    from transformers import modeling_flash_attention_utils as inside

    made: list[tuple[str, tuple[int, ...]]] = []
    inside.lazy_import_flash_attention(FLASH)
    for slot in ("_flash_fn", "_flash_varlen_fn"):
        function = getattr(inside, slot)

        def listening(q: Tensor, *rest: Any, function: Any = function, **asked: Any) -> Any:
            made.append((function.__name__, tuple(q.shape)))
            return function(q, *rest, **asked)

        monkeypatch.setattr(inside, slot, listening)
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_with_padding_and_without(family: str, side: str, calls: list[Any]) -> None:
    stock, ours = beside_stock(family)
    ids, mask = padded_batch(side)
    with torch.no_grad():
        right, found = stock(ids, attention_mask=mask).logits, ours(ids, attention_mask=mask).logits
        torch.testing.assert_close(found[mask.bool()], right[mask.bool()], **TOLERANCE)
        assert calls == [("flash_attn_varlen_func", (22, 4, 16))] * 2  # without the 14 tokens of padding
        torch.testing.assert_close(ours(ids).logits, stock(ids).logits, **TOLERANCE)
    assert {name for name, _ in calls[2:]} == {"flash_attn_func"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    stock, ours = beside_stock("llama")
    ids, mask = padded_batch()
    with torch.no_grad():
        right = stock(ids, attention_mask=mask).logits
        half = stock.to(dtype)(ids, attention_mask=mask).logits
        found = ours.to(dtype)(ids, attention_mask=mask).logits
    rounding = (half.float() - right)[mask.bool()].abs().max()
    assert found.dtype is dtype
    assert (found.float() - right)[mask.bool()].abs().max() <= 2 * rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_one_another(family: str, calls: list[Any]) -> None:
    stock, ours = beside_stock(family)
    ids, _ = padded_batch()
    lengths = (5, 4, 3)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        found = ours(ids[:1], position_ids=positions).logits[0]
        right = torch.cat([stock(part[None]).logits[0] for part in ids[0].split(lengths)])
    torch.testing.assert_close(found, right, **TOLERANCE)
    assert calls == [("flash_attn_varlen_func", (12, 4, 16))] * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation(family: str, cache: str | None, padded: bool) -> None:
    stock, ours = beside_stock(family)
    ids, mask = padded_batch()
    asked: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, cache_implementation=cache)
    asked["attention_mask"] = mask if padded else torch.ones_like(mask)
    assert torch.equal(ours.generate(ids, **asked), stock.generate(ids, **asked))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_continuous_batching(family: str) -> None:
    stock, ours = beside_stock(family)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [20] * 11]
    settings = tf.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = ours.generate_batch(inputs=prompts, generation_config=settings)
    assert len(answers) == 3
    for answer in answers.values():
        prompt = torch.tensor([list(answer.prompt_ids)])
        right = stock.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=-1)
        assert answer.generated_tokens == right[0, prompt.shape[1] :].tolist()


def test_decoding_with_block_tables_as_the_engine_calls_it(flash: Any) -> None:
    """The engine takes this way on CUDA devices; its call is the same here."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    sequences, held = 3, torch.tensor([5, 0, 9])
    q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    k_cache, v_cache = torch.randn(8, 4, 2, 8), torch.randn(8, 4, 2, 8)
    table = torch.tensor([[3, 7, -1], [1, -1, -1], [2, 4, 5]], dtype=torch.int32)
    copies = k_cache.clone(), v_cache.clone()
    sums = torch.nn.functional.pad((held + 1).cumsum(0), (1, 0)).int()
    out = _flash_attention_forward(
        q, k, v, None, sequences, True, attn_implementation=FLASH, block_table=table, cu_seq_lens_q=None,
        cu_seq_lens_k=sums, max_length_q=1, max_length_k=10, k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip
    right = flash.flash_attn_with_kvcache(
        q[0][:, None], *copies, k[0][:, None], v[0][:, None], cache_seqlens=held.int(), block_table=table, causal=True
    )
    assert torch.equal(out[0], right[:, 0])
    assert torch.equal(k_cache, copies[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(family: str) -> None:
    stock, ours = beside_stock(family)
    ids, mask = padded_batch("right")
    labels = ids.masked_fill(mask == 0, -100)
    for model in (stock, ours):
        model.train()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    pairs = list(zip(stock.named_parameters(), ours.parameters(), strict=True))
    assert all(parameter.grad is not None for _, parameter in pairs)
    for (name, right), found in pairs:
        torch.testing.assert_close(found.grad, right.grad, atol=2e-6, rtol=1e-4, msg=name)


def test_compiled_without_a_break() -> None:
    """In half precision: in fp32 Transformers warns from inside the graph, which breaks it there."""
    _, ours = beside_stock("mistral")
    ids, _ = padded_batch()
    ours.to(torch.bfloat16)
    with torch.no_grad():
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        found, right = compiled(ids, use_cache=False).logits, ours(ids, use_cache=False).logits
    torch.testing.assert_close(found, right, atol=2e-2, rtol=0)


def test_attention_dropout_is_refused_by_name() -> None:
    _, ours = beside_stock("llama")
    ids, _ = padded_batch()
    ours.train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout_p: got 0\.1, expected 0"):
        ours(ids)


def test_an_unknown_publisher_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the override the name is looked up on the Hub; offline there is nothing, and nothing else is taken."""
    monkeypatch.delenv("LOCAL_KERNELS")
    with pytest.raises(ValueError, match="adaattn/flash-adaattn-elsewhere"):
        tf.AutoModelForCausalLM.from_config(FAMILIES["llama"](), attn_implementation="adaattn/flash-adaattn-elsewhere")


def test_the_loader_reads_what_the_build_wrote(repositories: Path) -> None:
    rust = kernels._rust
    for repository in repositories.iterdir():
        build = rust.Build.open(repository)
        assert [str(each).rpartition(".")[2].lower() for each in build.general.backends] == ["cpu", "cuda"]
        for directory in (repository / "build").iterdir():
            metadata = rust.Metadata.read_from_file(directory / "metadata.json")
            metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, directory))
            assert metadata.version == 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kernels.variants.parse_variant(directory.name)
    (ours,) = (repositories / "flash-adaattn" / "build").glob(CPU)
    assert Path(kernels.get_local_kernel(repositories / "flash-adaattn").__file__).parent == ours
