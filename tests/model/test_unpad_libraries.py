"""sentence-transformers, the real library, on encoders without padding."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import adaattn_hf

from ..support.choices import make_choice
from ..support.models import fresh_pair, padding, tokens
from ..support.plans import plan_for
from ..support.sentences import SENTENCES, embedder, tiny_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

EXAMPLE = "examples/sentence_transformers_unpad.py"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


def test_embeddings_are_those_of_the_stock_model(encoder: Path) -> None:
    stock, ours = embedder(encoder, "sdpa"), embedder(encoder, "adaattn")
    assert adaattn_hf.prepare(ours) is ours
    expected, actual = (m.encode(SENTENCES, convert_to_tensor=True) for m in (stock, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert adaattn_hf.unpad_calls(ours) == {"unpadded": 1}
    one = ours.encode(SENTENCES[0], convert_to_tensor=True)
    torch.testing.assert_close(one, expected[0], rtol=1e-5, atol=1e-6)
    assert "forward" in vars(ours[0].model)
    adaattn_hf.restore(ours)
    assert "forward" not in vars(ours[0].model)
    torch.testing.assert_close(ours.encode(SENTENCES, convert_to_tensor=True), expected, rtol=1e-5, atol=1e-6)


def test_training_losses_see_the_same_gradients(encoder: Path) -> None:
    gradients = []
    for implementation in ("sdpa", "adaattn"):
        model = embedder(encoder, implementation)
        if implementation == "adaattn":
            adaattn_hf.prepare(model)
        model.eval()
        features = [model.tokenizer(SENTENCES[a : a + 3], padding=True, return_tensors="pt") for a in (0, 3)]
        losses.MultipleNegativesRankingLoss(model)([dict(f) for f in features], torch.zeros(3)).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_the_example_runs(
    encoder: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE, str(encoder), "--sentences", "4"])
    monkeypatch.setattr("random.Random.choices", lambda self, words, k: words[: min(k, 20)])
    runpy.run_path(str(checkout / EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "times as fast" in said
    assert "{'unpadded':" in said


@pytest.mark.assets
def test_a_real_encoder_is_exact_and_reads_no_padding_of_a_ragged_batch(assets: Path) -> None:
    path = assets / "models" / "all-MiniLM-L6-v2-hf"
    if not path.is_dir():
        pytest.skip(f"needs the encoder {path}")
    stock, ours = embedder(path, "sdpa"), embedder(path, "adaattn")
    adaattn_hf.prepare(ours)
    text = "Embeddings of a ragged batch cost what its longest sentence costs, unless padding is left out. " * 12
    words = text.split()
    batch = [" ".join(words[:n]) for n in (4, 6, 9, 12, 15, 20, 30, 160)]
    rows: list[int] = []
    for model in (stock, ours):
        dense = model[0].model.encoder.layer[0].intermediate.dense
        dense.register_forward_hook(lambda _, __, out: rows.append(out.shape[:-1].numel()))
    expected, actual = (m.encode(batch, batch_size=len(batch), convert_to_tensor=True) for m in (stock, ours))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    lengths = [len(ids) for ids in stock.tokenizer(batch)["input_ids"]]
    assert rows == [len(batch) * max(lengths), sum(lengths)]


@torch.no_grad()
def test_an_offloaded_model_is_prepared() -> None:
    accelerate = pytest.importorskip("accelerate")
    stock, ours = fresh_pair("llama")
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    ids, mask = tokens(), padding("left")
    adaattn_hf.prepare(ours)
    found, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (ours, stock))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
    assert adaattn_hf.unpad_calls(ours) == {"unpadded": 1}


def test_explain_and_check_look_inside(encoder: Path) -> None:
    ours = embedder(encoder, "adaattn")
    adaattn_hf.check(ours)
    (tower,) = (module for module in ours.modules() if isinstance(module, tf.BertModel))
    inside, held = adaattn_hf.explain(tower), adaattn_hf.explain(ours)
    assert held.model == "BertModel"
    assert [choice.backend for choice in held.layers] == [choice.backend for choice in inside.layers]
    names = dict(ours.named_modules())
    assert held.layers
    assert all(choice.layer in names for choice in held.layers)
    with pytest.raises(ValueError, match="its attention implementation is 'sdpa', not one of AdaAttn's"):
        adaattn_hf.explain(embedder(encoder, "sdpa"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's own names
@pytest.mark.parametrize("kind", ["embedder", "reranker", "pipeline", "adapters"])
def test_what_takes_a_model_takes_what_holds_one(encoder: Path, kind: str) -> None:
    """And what changes a model returns what it was given."""
    thing: Any
    if kind == "embedder":
        thing = embedder(encoder, "adaattn")
    elif kind == "reranker":
        keywords = {"attn_implementation": "adaattn", "dtype": torch.float32}
        thing = sentence_transformers.CrossEncoder(str(encoder), num_labels=1, model_kwargs=keywords, device="cpu")
    else:
        thing = tf.BertForMaskedLM.from_pretrained(encoder, attn_implementation="adaattn").eval()
        if kind == "pipeline":
            tokenizer = tf.AutoTokenizer.from_pretrained(encoder)
            thing = tf.pipeline("feature-extraction", model=thing, tokenizer=tokenizer, device="cpu")
        else:
            peft = pytest.importorskip("peft")
            thing = peft.get_peft_model(thing, peft.LoraConfig(r=2, target_modules=["query"])).eval()
    holder = thing.model if kind == "pipeline" else thing
    tower: Any = next(module for module in holder.modules() if isinstance(module, tf.PreTrainedModel))
    adaattn_hf.check(thing)
    found, names = adaattn_hf.explain(thing), dict(holder.named_modules())
    assert found.layers
    assert found.model == type(tower).__name__
    assert all(choice.layer in names for choice in found.layers)
    assert adaattn_hf.prepare(thing) is thing
    assert adaattn_hf.unpad_calls(thing) == {}
    assert "forward" in vars(tower) or tower._forward_pre_hooks
    assert adaattn_hf.restore(thing) is thing
    assert not tower._forward_pre_hooks
    assert adaattn_hf.configure(thing, adaattn_hf.AdaAttnConfig(backend="eager")) is thing
    assert {choice.backend for choice in adaattn_hf.explain(thing).layers} == {"eager"}
    adaattn_hf.configure(thing, "exact")
    plan = plan_for(tower, make_choice("window", 2, 1))
    assert adaattn_hf.load_plan(thing, plan) is thing
    assert adaattn_hf.plan_of(thing) == plan
    assert any(choice.plan for choice in adaattn_hf.explain(thing).layers)
    with adaattn_hf.monitoring(thing), torch.no_grad():
        tower(input_ids=tokens() % 50)
    assert adaattn_hf.statistics(thing)
    assert adaattn_hf.remove_plan(thing) is thing
    assert adaattn_hf.plan_of(thing) is None
    with adaattn_hf.record(thing) as exact, torch.no_grad():
        tower(input_ids=tokens() % 50)
    with adaattn_hf.use_plan(thing, plan), adaattn_hf.record(thing) as seen, torch.no_grad():
        tower(input_ids=tokens() % 50)
    assert str(seen) != str(exact), "one ran by the plan"
