"""The same documents through lm-evaluation-harness's own tasks and model give the same numbers."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from adaattn_hf.eval import corpora, lm_eval_model, runner
from adaattn_hf.eval.settings import Settings
from adaattn_hf.patches import checkpoint

from .conftest import OWN_PAGES, OWN_PASSAGES, PAGES, PASSAGES
from .test_planned import kept

# what other packages warn of while they are used is not ours to mend
pytestmark = pytest.mark.filterwarnings("default")


TASKS = Path(lm_eval.__file__).parent / "tasks"
FILES = {"wikitext": TASKS / "wikitext" / "wikitext.yaml", "lambada_openai": TASKS / "lambada" / "lambada_openai.yaml"}


def their_task(name: str, field: str, texts: tuple[str, ...], directory: Path) -> TaskManager:
    """The task as lm-evaluation-harness has it, with its documents from a local file."""
    path = directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps({field: t}) + "\n" for t in texts), encoding="utf-8")
    task = {
        "include": str(FILES[name]), "task": name, "dataset_path": "json", "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(directory)}, "training_split": None,
        "validation_split": None,
    }  # fmt: skip
    (directory / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return TaskManager(include_path=str(directory), include_defaults=False)


def theirs(model: Any, name: str, manager: TaskManager, **keywords: Any) -> dict[str, float]:
    results = lm_eval.simple_evaluate(
        model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=False, **keywords
    )
    return {key.partition(",")[0]: value for key, value in results["results"][name].items()}


def ours(directory: Path, corpus: corpora.Corpus, **settings: Any) -> dict[str, Any]:
    loaded = checkpoint.load(directory, device="cpu")
    settings = {"attn_implementation": "sdpa", **settings}
    return runner.evaluate(loaded, corpus, Settings(**settings))["quality"]["arms"][1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "length"), [("llama", None), ("gpt2", 24)])
def test_wikitext(request: pytest.FixtureRequest, tmp_path: Path, kind: str, length: int | None) -> None:
    directory = request.getfixturevalue(kind)
    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2, max_length=length)
    expected = theirs(model, "wikitext", their_task("wikitext", "page", PAGES, tmp_path))
    found = ours(directory, OWN_PAGES, context=length, batch_size=3)
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.parametrize(("kind", "length"), [("llama", None), ("gpt2", 12)])
def test_lambada(request: pytest.FixtureRequest, tmp_path: Path, kind: str, length: int | None) -> None:
    directory = request.getfixturevalue(kind)
    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2, max_length=length)
    expected = theirs(model, "lambada_openai", their_task("lambada_openai", "text", PASSAGES, tmp_path))
    found = ours(directory, OWN_PASSAGES, context=length, batch_size=3)
    # the exponential of some thirty nats, which other batches sum in another order
    assert found["last_word_perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
    assert found["accuracy"] == expected["acc"]


def test_our_model_is_known_to_their_registry_agrees_and_runs_our_attention(llama: Path, tmp_path: Path) -> None:
    manager = their_task("wikitext", "page", PAGES, tmp_path)
    arguments = f"pretrained={llama},dtype=float32"
    found = theirs(lm_eval_model.NAME, "wikitext", manager, model_args=arguments, device="cpu", batch_size=1)
    assert found["word_perplexity"] == pytest.approx(ours(llama, OWN_PAGES)["word_perplexity"], rel=1e-6)
    fresh = lm_eval_model.AdaAttnLM(pretrained=str(llama), device="cpu", dtype="float32")
    assert fresh.model.config._attn_implementation == "adaattn"
    loaded = checkpoint.load(llama, device="cpu")
    wrapped = lm_eval_model.AdaAttnLM(
        pretrained=loaded.model, tokenizer=loaded.tokenizer, attn_implementation="adaattn_eager", device="cpu"
    )
    assert wrapped.model.config._attn_implementation == "adaattn_eager"


def test_a_plan_is_handed_over_by_model_args(llama: Path, tmp_path: Path) -> None:
    manager = their_task("wikitext", "page", PAGES, tmp_path)
    plan = kept(checkpoint.load(llama, device="cpu"), tmp_path / "narrow", 2)

    def perplexity(plan: str) -> float:
        arguments = f"pretrained={llama},dtype=float32,plan={plan}"
        found = theirs(lm_eval_model.NAME, "wikitext", manager, model_args=arguments, device="cpu", batch_size=1)
        return found["word_perplexity"]

    exact, planned = perplexity("none"), perplexity(plan)
    assert exact == pytest.approx(ours(llama, OWN_PAGES)["word_perplexity"], rel=1e-6)
    expected = ours(llama, OWN_PAGES, attn_implementation="adaattn", plan=plan)["word_perplexity"]
    assert planned == pytest.approx(expected, rel=1e-5)
    assert abs(planned / exact - 1) > 1e-4


@pytest.mark.assets
def test_a_tokenizer_that_adds_bos(assets: Path, tmp_path: Path) -> None:
    """LLaMA's tokenizer adds BOS, which the rolling recipe then scores after its prefix token; both agree in that."""
    directory = assets / "models" / "stories260K-hf"
    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2)
    found = ours(directory, OWN_PAGES, batch_size=3)
    expected = theirs(model, "wikitext", their_task("wikitext", "page", PAGES, tmp_path))
    assert found["word_perplexity"] == pytest.approx(expected["word_perplexity"], rel=1e-6)
    expected = theirs(model, "lambada_openai", their_task("lambada_openai", "text", PASSAGES, tmp_path))
    found = ours(directory, OWN_PASSAGES, batch_size=3)
    assert found["last_word_perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
