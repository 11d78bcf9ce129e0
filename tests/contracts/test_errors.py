"""Every error message names the argument, what was passed, what was expected and the remedy.

The messages themselves are recorded in docs/errors.md.
"""

import copy
import functools
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as tf
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import BertForMaskedLM, BertModel

import adaattn_hf
from adaattn_cli.commands import CALIBRATE, VERIFY
from adaattn_cli.job import directories, directory
from adaattn_cli.verify import prove
from adaattn_hf.attention.call import AttentionCall
from adaattn_hf.attention.stored import StoredKV
from adaattn_hf.attention.structure import MaskStructure
from adaattn_hf.backends.native.library import load as load_library
from adaattn_hf.backends.select import by_name
from adaattn_hf.calibration.settings import CalibrationSettings
from adaattn_hf.calibration.state import CalibrationState
from adaattn_hf.eval.objectives import MaskedTokens
from adaattn_hf.eval.provenance import commit
from adaattn_hf.eval.texts import text_of
from adaattn_hf.patches.cache.layers import CachedLayer
from adaattn_hf.patches.call.batching import attend_requests
from adaattn_hf.patches.call.interface import attention_function
from adaattn_hf.patches.mask.documents import with_documents
from adaattn_hf.patches.mask.masks import adaattn_mask
from adaattn_hf.patches.mask.structured_mask import StructuredMask
from adaattn_hf.plans import execute
from adaattn_hf.plans.bound_layer import BoundLayer
from adaattn_hf.plans.plan import Choice, LayerPlan, Plan
from adaattn_hf.plans.tensors import LayerTensors

from ..support.calibration import calibrate
from ..support.choices import make_choice
from ..support.families import models
from ..support.models import config_of, fresh_pair, tokens
from ..support.plans import PROVEN, give, plan_for
from ..support.source_tree import ROOT

TABLE = ROOT / "docs" / "errors.md"


Case = tuple[str, Callable[[], Any], str]


def attend(
    mask: Any = None,
    *,
    heads: int = 2,
    key_heads: int | None = None,
    batch: int = 1,
    backend: str | None = None,
    **keywords: Any,
) -> Any:
    query = torch.zeros(batch, heads, 6, 4, requires_grad=keywords.pop("requires_grad", False))
    key = query if key_heads is None else torch.zeros(batch, key_heads, 6, 4)
    return attention_function(backend)(nn.Module(), query, key, key, mask, **keywords)


def under(variable: str, value: str, call: Callable[[], Any]) -> Any:
    with mock.patch.dict(os.environ, {variable: value}):
        return call()


def planned(choice: Choice, heads: int = 2, requires_grad: bool = False) -> Any:
    """A layer that computes `choice` in each of two key/value heads, on keys with `heads` of them."""
    bound_layer = BoundLayer(LayerPlan(0, "hash", (choice, choice)), LayerTensors(), 64)
    x = torch.zeros(1, heads, 20, 4, requires_grad=requires_grad)
    return execute.attend(bound_layer, AttentionCall(x, x, x, MaskStructure(1, 20, 20, causal=True), scaling=0.5))


def run_with(**settings: Any) -> Any:
    _, model = fresh_pair("gpt2")
    model.config.adaattn = settings
    return model(input_ids=tokens())


def with_plan(block: AbstractContextManager[Any] | None = None, allowed: float = 0.0, **changes: Any) -> Any:
    model = fresh_pair("llama").ours
    model.config.adaattn = {"budget": allowed}
    plan = plan_for(model, make_choice("window", window=2)).to_dict()
    adaattn_hf.load_plan(model, Plan.from_dict({**plan, **changes}))
    with block or nullcontext(), torch.no_grad():
        return model(input_ids=tokens())


def with_plan_taken_out_by_hand() -> Any:
    model = fresh_pair("llama").ours
    give(model, make_choice("window", window=2))
    model.config.adaattn = {}
    return model(input_ids=tokens())


def with_layer_of_planned_model() -> Any:
    model, other = fresh_pair("llama").ours, fresh_pair("llama").ours
    give(model, make_choice("window", window=2))
    other.model.layers[0] = copy.deepcopy(model.model.layers[0])
    return other(input_ids=tokens())


SUMS = {"cu_seq_lens_q": torch.tensor([0, 6]), "cu_seq_lens_k": torch.tensor([0, 6]), "read_index": []}


def step(*mask: Any, **keywords: Any) -> Any:
    return attend_requests(None, nn.Module(), ZEROS, ZEROS, ZEROS, *mask, **keywords)


def captured_step() -> Any:
    with mock.patch("adaattn_hf.patches.call.batching.capturing", return_value=True):
        return step(**SUMS)


def explain_stock() -> Any:
    model = tf.AutoModelForCausalLM.from_config(config_of("gpt2"), attn_implementation="sdpa")
    return adaattn_hf.explain(model)


def load_damaged() -> Any:
    model = fresh_pair("llama")[1]
    with tempfile.TemporaryDirectory() as directory:
        path = adaattn_hf.save_cache(adaattn_hf.AdaAttnCache(model, "int8"), Path(directory) / "prompt")
        path.write_bytes(path.read_bytes().replace(b"int8", b"k8v4"))
        return adaattn_hf.load_cache(path, model)


@torch.no_grad()
def numbers_for_codes() -> Any:
    layer = CachedLayer("int8")
    layer.update(ZEROS, ZEROS)
    layer.keys = ZEROS


@torch.no_grad()
def keys_without_values() -> Any:
    layer = CachedLayer("model")
    layer.update(ZEROS, ZEROS)
    layer.keys = ZEROS[:, :, ::2]
    layer.update(ZEROS, ZEROS)


def run_unrouted() -> Any:
    config = tf.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2, pad_token_id=0)
    return adaattn_hf.check(config)


def calibrate_tiny(made: type[Any], length: int = 64, **more: Any) -> Any:
    config = config_of("bert")
    config._attn_implementation = "adaattn"
    families = more.pop("families", CalibrationSettings().families)
    settings = CalibrationSettings(lengths=(length,), held_out=2, families=families)
    return calibrate(made(config), lambda text: [4 + ord(one) % 60 for one in text], [__file__], settings, **more)


ZEROS = torch.zeros(1, 2, 6, 4)
WORDS = Tokenizer(WordLevel({"a": 0}))
INT8 = {"stored": "int8", "streaming": False}
SIX = StructuredMask(MaskStructure(1, 6, 6, causal=True), torch.device("cpu"))
BEHIND = MaskStructure(1, 6, 9, causal=True, q_offset=3, window=2)
EIGHT = StructuredMask(MaskStructure(1, 8, 8, causal=True), torch.device("cpu"))


def small_plan(**fields: Any) -> Plan:
    return plan_for(fresh_pair("llama").ours, make_choice("window", window=2), **fields)


CASES: dict[str, tuple[Case, ...]] = {
    "Names and settings": (
        ("name a backend that does not exist", lambda: by_name("flash"),
         "backend | 'flash' | expected one of | sdpa"),
        ("force a backend on a call that it does not support", lambda: attend(backend="fa2"),
         "'fa2' | got cpu tensors | run on CUDA devices | attn_implementation=\"adaattn\""),
        ("misspell an instruction set", lambda: under("ADAATTN_NATIVE_LEVEL", "avx256", lambda: load_library(ROOT)),
         "ADAATTN_NATIVE_LEVEL | 'avx256' | expected one of | Did you mean 'avx2'?"),
        ("set ADAATTN_COMMIT to something that is not a hash",
         lambda: under("ADAATTN_COMMIT", "newest", lambda: commit(Path("/nowhere"))),
         "ADAATTN_COMMIT | 'newest' | expected the digits of a commit | leave it unset"),
        ("load a model that has its own attention code", run_unrouted,
         "attn_implementation | BloomConfig | attention interface | attn_implementation='eager'"),
        ("call configure on something that is not a model",
         lambda: adaattn_hf.configure(torch.nn.Linear(2, 2), "exact"),
         "model | got Linear | expected a Transformers model | from_pretrained"),
        ("misspell a setting", lambda: run_with(bugdet=0.001),
         "adaattn | 'bugdet' | expected one of | Did you mean 'budget'?"),
        ("write only the name of a preset into the settings", lambda: run_with(preset="fast"),
         "adaattn.preset | got 'fast' with a budget of 0 | expected the settings | configure(model, 'fast')"),
        ("name a preset that does not exist", lambda: adaattn_hf.load_preset("fasd"),
         "preset | got 'fasd' | expected one of | Did you mean 'fast'?"),
        ("load a configuration with unverified: true", lambda: run_with(unverified=True),
         "adaattn.unverified | got True | expected no such setting | load_plan(model, unverified=True)"),
        ("write the name of a preset in place of the settings",
         lambda: adaattn_hf.AdaAttnConfig.from_dict("fast"),  # type: ignore[arg-type]
         "config.adaattn | got str | expected a mapping | configure(model, adaattn_hf.AdaAttnConfig(...))"),
        ("give configure a dictionary", lambda: adaattn_hf.configure(torch.nn.Linear(2, 2), {"monitor": True}),  # type: ignore[arg-type]
         "settings | got {'monitor': True} | expected an AdaAttnConfig | configure(model, adaattn_hf.AdaAttnConfig"),
        ("give a budget in percent", lambda: adaattn_hf.AdaAttnConfig(budget=5),
         "adaattn.budget | got 5 | from 0 (no limit) to below 1 | 0.1 % is 0.001"),
        ("load settings of another version", lambda: adaattn_hf.AdaAttnConfig.from_dict({"version": 99}),
         "adaattn.version | got 99 | reads 1 | install the version"),
    ),
    "Inputs of attention": (
        ("pass a layer a mask for other lengths", lambda: attend(EIGHT),
         "attention_mask | 8 queries and 8 keys | got 6 queries and 6 keys | pass the mask of this call"),
        ("pass a layer a mask for another batch size",
         lambda: attend(StructuredMask(MaskStructure(3, 6, 6), torch.device("cpu")), batch=2),
         "structure | batch of 3 | batch 2 | pass an attention_mask"),
        ("pass a padding mask with the wrong batch size",
         lambda: adaattn_mask(3, 6, 6, attention_mask=torch.zeros(2, 6)),
         "attention_mask | 2 rows | a batch of 3 | repeat or drop rows"),
        ("pass a mask that is not a tensor", lambda: attend([[1, 1, 1, 1, 1, 1]]),
         "attention_mask | got list | expected a tensor | True = attend"),
        ("pass a mask of the wrong shape", lambda: attend(torch.ones(1, 1, 5, 6, dtype=torch.bool)),
         "attention_mask | (1, 1, 5, 6) | expected | (1, 2, 6, 6)"),
        ("pass a mask of integers", lambda: attend(torch.ones(1, 1, 6, 6, dtype=torch.int64)),
         "attention_mask | torch.int64 | expected bool (True = attend) or floating point | .bool()"),
        ("give a negative softcap", lambda: attend(softcap=-2.0),
         "softcap | -2.0 | expected a positive number | or None"),
        ("give a softcap that is not a number", lambda: attend(softcap="much"),
         "softcap | much | expected a positive number | or None"),
        ("pass integer queries", lambda: attention_function()(nn.Module(), *[ZEROS.long()] * 3, None),
         "query | torch.int64 | expected a floating-point dtype | .float()"),
        ("pass fp8 keys",
         lambda: attention_function()(nn.Module(), ZEROS, *[ZEROS.to(torch.float8_e4m3fn)] * 2, None),
         "key | torch.float8_e4m3fn | expected a floating-point dtype of 16 bits or more | .float()"),
        ("move a part of a cache to another device",
         lambda: StoredKV(torch.zeros(1, device="meta"), torch.zeros(1)).check_device(torch.device("cpu")),
         "stored.key_scale | on meta | codes on cpu, expected one device | move the whole cache"),
        ("pass attention an unknown keyword", lambda: attend(alibi=torch.ones(2)),
         "alibi | got Tensor | does not know | adaattn_hf.allow_keywords('alibi')"),
        ("allow a keyword that changes attention", lambda: adaattn_hf.allow_keywords("cu_seq_lens_q"),
         "names | got 'cu_seq_lens_q' | expected keywords that attention may ignore | of your loss function"),
        ("pass a mask to a step of continuous batching",
         lambda: step(torch.ones(1, 1, 6, 6), **SUMS),
         "attention_mask | got a mask | expected none | leave the block"),
        ("mix dtypes in one call",
         lambda: AttentionCall(ZEROS, *[ZEROS.bfloat16()] * 2, MaskStructure(1, 6, 6), 1.0).check(),
         "query, key, value | torch.bfloat16 | expected one dtype | key.to(query.dtype)"),
        ("pass learned sinks for another number of heads", lambda: attend(s_aux=torch.zeros(3)),
         "sink_logits | (3,) | expected one for each of the 2 query heads | slice"),
        ("pass more key heads than query heads", lambda: attend(key_heads=4),
         "key | got 4 heads for 2 query heads | expected a divisor of 2 | repeat or drop"),
        ("pass a number of key heads that does not divide the query heads", lambda: attend(heads=3, key_heads=2),
         "key | got 2 heads for 3 query heads | expected a divisor of 3 | repeat or drop"),
    ),
    "Packing and continuous batching": (
        ("pack documents in several batch rows", lambda: attend(batch=2, cu_seq_lens_q=torch.tensor([0, 2, 6])),
         "cu_seq_lens_q | batch of 2 | one batch row | flatten the batch"),
        ("pack documents with decreasing cumulative lengths",
         lambda: attend(SIX, cu_seq_lens_q=torch.tensor([0, 4, 2, 6])),
         "cu_seq_lens_q | [0, 4, 2, 6] | from 0 to at most 6 | cumsum"),
        ("pack documents whose keys do not fit",
         lambda: attend(SIX, cu_seq_lens_q=torch.tensor([0, 4, 6]), cu_seq_lens_k=torch.tensor([0, 3, 6])),
         "cu_seq_lens_k | got [0, 3, 6] for cu_seq_lens_q [0, 4, 6] | expected the same | added to all but the 0"),
        ("continue a cache with several documents in a layer with a window",
         lambda: with_documents(BEHIND, *[torch.tensor([0, 2, 6])] * 2),
         "cu_seq_lens_q | all continue what a cache holds | expected a layer without | one by one"),
        ("pack documents beside a dense mask of more keys than queries",
         lambda: attention_function()(nn.Module(), ZEROS[:, :, :5], ZEROS, ZEROS, torch.ones(5, 6)[None, None],
                                      cu_seq_lens_q=torch.tensor([0, 5])),
         "cu_seq_lens_q | an attention_mask of 5 queries | expected as many keys | pass one of the two alone"),
        ("use continuous batching without its block", lambda: attend(SIX, cache=object()),
         "cache | Module | paged cache | adaattn_hf.continuous_batching(model)"),
        ("call generate inside the block of continuous batching", step,
         "attn_implementation | Module | supports only steps | leave the block"),
        ("use CUDA graphs in continuous batching", captured_step,
         "use_cuda_graph | got True | expected False | ContinuousBatchingConfig(use_cuda_graph=False)"),
        ("open the block of continuous batching for a model with stock attention",
         lambda: adaattn_hf.continuous_batching(nn.Module()).__enter__(),
         "model | got attention None | expected 'adaattn' | set_attn_implementation(\"adaattn\")"),
        ("call explain on a model with stock attention", explain_stock,
         "model | 'sdpa' | not one of AdaAttn's | set_attn_implementation(\"adaattn\")"),
    ),
    "Caches": (
        ("ask for streaming heads without a plan of windows",
         lambda: adaattn_hf.AdaAttnCache(fresh_pair("llama")[1], "int8", streaming=True),
         "streaming | without a plan | expected one with windows of at least 16 tokens | leave streaming out"),
        ("use a quantised cache with a model that computes with its cached keys",
         lambda: adaattn_hf.AdaAttnCache(models("doge", {}, tf.AutoModelForCausalLM).ours, "int8"),
         "cache | got 'int8' for DogeForCausalLM | expected a model that does not | cache=\"model\""),
        ("replace the keys of a quantised cache by a float tensor", numbers_for_codes,
         'cache | replaced by a Tensor | expected them left as they are | cache="model"'),
        ("replace the keys of a cache, but not its values", keys_without_values,
         "cache | replaced by [1, 2, 3, 4] beside values [1, 2, 6, 4] | expected the same | assign the layer's values"),
        ("load a damaged cache file", load_damaged,
         "path | its checksum is not that of its content | expected what was written | read the prompt again"),
        ("set --kv-bytes for a plan of prompts", lambda: CalibrationSettings(kv_bytes=0.4),
         "kv_bytes | 0.4 | expected none beside the aim 'prompt' | add --aim memory"),
        ("set --kv-bytes to 0", lambda: CalibrationSettings(kv_bytes=0.0),
         "kv_bytes | 0.0 | expected a share of the bytes below 1 | 0.4x"),
        ("give a cache a growth factor below 1", lambda: adaattn_hf.GrowingCache(growth=0.5),
         "growth | got 0.5 | larger than 1 | such as 1.25"),
    ),
    "Plans": (
        ("write a plan with an unknown choice", lambda: make_choice(kind="windw"),
         "kind | 'windw' | expected one of | Did you mean 'window'?"),
        ("write a plan with a window for an exact choice", lambda: make_choice(kind="exact", window=64),
         "window | is 64 | kind 'exact' | expected 0"),
        ("load a plan of another version", lambda: Plan.from_dict({"format": 99}),
         "plan format | 99 | this version reads | calibrate again"),
        ("load a plan without the hash of its model", lambda: with_plan(weight_hash=""),
         "weight_hash | is '' | expected 'model:' | calibrate again"),
        ("load a plan that contradicts its own verification",
         lambda: with_plan(verified=asdict(replace(PROVEN, upper=9.0))),
         "verified.passed | upper bound of 9.0 | above the budget | calibrate again"),
        ("run a plan whose verification is below today's limits",
         lambda: with_plan(verified=asdict(replace(PROVEN, confidence=0.5))),
         "the plan | the bound is at 50.00 %, below 95 % | only if you allow it | load_plan(model, unverified=True)"),
        ("bind a plan of a larger budget than the model's settings allow", lambda: with_plan(allowed=1e-4),
         "budget | got a plan for +0.1 % perplexity | expected at most +0.01 % | calibrate with --budget 0.01%"),
        ("run a plan that was never verified", lambda: with_plan(verified=None),
         "the plan | was never verified | only if you allow it | load_plan(model, unverified=True)"),
        ("run a plan under other settings of the model", lambda: with_plan(configuration={"rms_norm_eps": 0.5}),
         "rms_norm_eps | this one has 1e-06 | verified for a model with 0.5 | calibrate again"),
        ("run a plan under autocast to another dtype", lambda: with_plan(torch.autocast("cpu", torch.bfloat16)),
         "autocast | computes in bfloat16 | calibrated in float32 | leave autocast"),
        ("run a plan on trained or merged weights", lambda: with_plan(weight_hash="model:another"),
         "weights of the model | fine-tuned, merged | calibrated on | remove_plan(model)"),
        ("take the plan of a model out of its configuration by hand", with_plan_taken_out_by_hand,
         "config.adaattn['plan'] | got another one | expected that one | remove_plan(model)"),
        ("run a copied layer of a planned model in another one", with_layer_of_planned_model,
         "LlamaAttention of layer 0 | taken from a model | checked for that model alone | load_plan(model)"),
        ("run a plan on another number of key/value heads", lambda: planned(make_choice(precision="bf16"), heads=4),
         "plan of layer 0 | got keys with 4 | made for 2 key/value heads | calibrate the model"),
        ("train under a plan with int8",
         lambda: planned(make_choice(precision="int8"), requires_grad=True).out.sum().backward(),
         "plan of layer 0 | int8 | no gradient | remove_plan(model)"),
    ),
    "Calibrating and verifying": (
        ("calibrate an encoder without a language-model head", lambda: calibrate_tiny(BertModel),
         "model | got BertModel | …ForMaskedLM | load_plan(model, directory)"),
        ("calibrate a masked LM as if it predicted next tokens", lambda: calibrate_tiny(BertForMaskedLM),
         "scoring | NextToken | bidirectional | scoring=MaskedTokens.of(tokenizer)"),
        ("calibrate a masked LM with a tokenizer without a mask token",
         lambda: MaskedTokens.of(tf.PreTrainedTokenizerFast(tokenizer_object=WORDS, name_or_path="gpt2")),
         "tokenizer | 'gpt2' has no mask token | expected the one | set tokenizer.mask_token"),
        ("calibrate at more tokens than the model has positions for",
         lambda: calibrate_tiny(BertForMaskedLM, length=128, scoring=MaskedTokens(3)),
         "lengths | [128] | at most the 96 tokens | BertForMaskedLM"),
        ("restrict a short calibration to windows",
         lambda: calibrate_tiny(BertForMaskedLM, scoring=MaskedTokens(3), families=("window",)),
         "families | window | no choice for 64 tokens | --lengths 512"),
        ("use --from with a directory without risks", lambda: CalibrationState.read(Path("nowhere/adaattn-plan")),
         "from | does not exist | expected the directory of a plan | leave --from out"),
        ("write plans of several budgets into one model",
         lambda: directories(CALIBRATE(model=".", in_place=True, budget=("0.1%", "1%"))),
         "in_place | got 2 budgets | expected one | leave --in-place out"),
        ("give a row of text that is null", lambda: text_of({"text": None}, "data: rows.jsonl line 2"),
         "data: rows.jsonl line 2 | 'text' is null | expected a string | leave the line out"),
        ("write a plan into a model of the Hub", lambda: directory(CALIBRATE(model="owner/name", in_place=True)),
         "in_place | got owner/name | expected the directory of a model that is yours | leave --in-place out"),
        ("set --output-dir to the directory of the model", lambda: directory(CALIBRATE(model=".", output_dir=Path())),
         "output_dir | . is the model's own directory | expected one for the plan alone | --in-place"),
        ("verify a plan without text", lambda: prove(VERIFY(model="model"), Console()),
         "data | is absent | expected text | --data FILE"),
        ("verify a plan whose file is damaged",
         lambda: small_plan(protocol={"cache": {**INT8, "verified": "yes"}}),
         "protocol.cache.verified | got str | expected a mapping of Verified fields | calibrate again"),
    ),
}  # fmt: skip
"""By part of the page: what you do, how, and what the message says: argument, what came, what was expected, remedy."""


@functools.cache
def error_of(call: Callable[[], Any]) -> Exception:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        call()
    return raised.value


@pytest.mark.parametrize("case", [one for part in CASES.values() for one in part], ids=lambda case: case[0])
def test_the_message_says_argument_got_expected_and_remedy(case: Case) -> None:
    _, call, says = case
    message = str(error_of(call))
    argument, got, expected, remedy = says.split(" | ")
    assert [part for part in (argument, got, expected, remedy) if part not in message] == [], message


def recorded(message: str) -> str:
    """A message without what depends on the machine, as a cell of a table."""
    message = re.sub(r"flash-attn is not installed \([^)]*\); ", "", message)
    message = re.sub(r"^path: \S+/prompt ", "path: prompt ", message)
    return message.replace("|", "\\|").replace("\n", " ")


def test_the_table_of_errors_is_up_to_date(snapshot: Callable[[Path, str], None]) -> None:
    lines = ["# Error messages", "", "What you do, and what the error says. Search for a phrase of your message."]
    for part, cases in CASES.items():
        lines += ["", f"## {part}", "", "| you … | error | message |", "|---|---|---|"]
        for does, call, _ in cases:
            error = error_of(call)
            lines.append(f"| {does} | `{type(error).__name__}` | {recorded(str(error))} |")
    snapshot(TABLE, "\n".join(lines) + "\n")
