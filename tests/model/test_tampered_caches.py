"""Saved caches in which anything was changed: refused in a sentence, or a cache that is what was saved."""

import copy
import functools
import json
import operator
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig

import adaattn_hf
from adaattn_hf.patches.cache import disk
from adaattn_hf.patches.models.cache_keyword import with_cache

from ..support.choices import make_choice
from ..support.families import models
from ..unit.test_tampered_plans import ANYTHING, places
from .test_streaming_cache import EXACT, give

KINDS = ("numbers", "codes", "windows", "streaming numbers", "streaming codes")
SIZES: dict[str, Any] = dict(
    vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip


@functools.cache
def saved(kind: str) -> tuple[Any, bytes]:
    """A model of two small layers, and the file of a cache of two sequences, one of which begins later."""
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=6) if kind == "windows" else LlamaConfig(**SIZES)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="adaattn").eval()
    streaming = kind.startswith("streaming")
    if streaming:
        give(model, ((EXACT, make_choice("window", 16, 2)),) * 2, 64)
    cache = adaattn_hf.AdaAttnCache(model, "model" if kind.endswith("numbers") else "int8", streaming=streaming)
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, :3] = 0
    tokens = torch.arange(46).reshape(2, 23) % 31
    with torch.no_grad():
        for start, stop in ((0, 20), (20, 21), (21, 23)):
            model(tokens[:, start:stop], attention_mask=mask[:, :stop], **with_cache(model, cache))
    return model, bytes_of(cache, model)


def bytes_of(cache: Any, model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        return adaattn_hf.save_cache(cache, Path(directory) / "cache", model).read_bytes()


def parts(data: bytes) -> tuple[dict[str, Tensor], Any]:
    length = int.from_bytes(data[:8], "little")
    return load(data), json.loads(json.loads(data[8 : 8 + length])["__metadata__"][disk._KEY])


def forged(tensors: dict[str, Tensor], about: Any) -> bytes:
    text = json.dumps(about)
    return save(tensors, {disk._KEY: text, disk._CHECKSUM: disk._checksum(text, tensors)})


def answer(kind: str, data: bytes) -> str:
    """What loading says: nothing, where it gives what is written as it was read."""
    model, _ = saved(kind)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cache"
        path.write_bytes(data)
        try:
            read: Any = adaattn_hf.load_cache(path, model)
        except ValueError as error:
            read = error
    if isinstance(read, ValueError):
        said = str(read).replace(directory, "")
        assert type(read) is ValueError, repr(read)
        assert said.startswith(("path: /cache ", "cache: ")), said
        assert "expected" in said
        assert len(said) < 900
        assert said.isprintable(), said
        return said
    tensors, about = parts(data)
    again, said_again = parts(bytes_of(read, model))
    assert {**about, "weights": None} == {**said_again, "weights": None}
    assert tensors.keys() == again.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype is again[name].dtype
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8))
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_read(kind: str) -> None:
    assert (answer(kind, saved(kind)[1]), answer(kind, forged(*parts(saved(kind)[1])))) == ("", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_noticed_wherever_it_is(kind: str) -> None:
    data = saved(kind)[1]
    header = 8 + int.from_bytes(data[:8], "little")
    noticed = 0
    places = [*range(0, header, 11), *range(header, len(data), 97), len(data) - 1]
    for number, place in enumerate(places):
        changed = bytearray(data)
        changed[place] ^= 1 << number % 8
        noticed += bool(answer(kind, bytes(changed)))
    # spaces that pad the header mean nothing
    assert noticed >= len(places) - 2


@pytest.mark.parametrize("kind", ["numbers", "streaming codes"])
def test_a_file_that_is_cut_off_or_goes_on_is_refused(kind: str) -> None:
    data = saved(kind)[1]
    for length in (*range(0, 16), *range(16, len(data), 211), len(data) - 1):
        assert answer(kind, data[:length])
    assert answer(kind, data + b"\0")
    assert answer(kind, data[: len(data) // 2] + data[len(data) // 2 + 8 :])


@settings(max_examples=60)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_no_field_can_be_changed_without_the_checksum(kind: str, data: st.DataObject) -> None:
    tensors, about = parts(saved(kind)[1])
    before = json.dumps(about)
    tamper(about, data)
    kept = {disk._KEY: json.dumps(about), disk._CHECKSUM: disk._checksum(before, tensors)}
    assert json.dumps(about) == before or answer(kind, save(tensors, kept))


def tamper(about: Any, data: st.DataObject) -> None:
    *way, last = data.draw(st.sampled_from(places(about)))
    holder = functools.reduce(operator.getitem, way, about)
    if data.draw(st.booleans()):
        holder[last] = data.draw(ANYTHING)
    else:
        del holder[last]


@settings(max_examples=300)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_a_header_that_contradicts_the_model_or_the_tensors_is_refused(kind: str, data: st.DataObject) -> None:
    """Also by somebody who makes the checksum anew."""
    tensors, about = parts(saved(kind)[1])
    tamper(about, data)
    answer(kind, forged(tensors, about))


CHANGES: dict[str, Any] = {
    "other dtype": lambda t: t.to(torch.int32) if t.dtype is not torch.int32 else t.float(),
    "double": lambda t: t.double(), "shorter": lambda t: t[:, :, :-1] if t.ndim > 2 else t[:-1],
    "longer": lambda t: torch.cat([t, t], dim=min(2, t.ndim - 1)), "fewer rows": lambda t: t[:1],
    "fewer heads": lambda t: t[:, :1] if t.ndim > 1 else t.int(),
    "more heads": lambda t: torch.cat([t, t], dim=1) if t.ndim > 1 else t.int(),
    "fewer channels": lambda t: t[..., :-1], "no row": lambda t: t[:0], "one number": lambda t: t.flatten()[0],
    "flat": lambda t: t.flatten(), "one more extent": lambda t: t[None], "gone": lambda t: None,
}  # fmt: skip


@settings(max_examples=200)
@given(kind=st.sampled_from(KINDS), change=st.sampled_from([*CHANGES]), data=st.data())
def test_tensors_that_contradict_others_or_the_header_are_refused(kind: str, change: str, data: st.DataObject) -> None:
    tensors, about = parts(saved(kind)[1])
    name = data.draw(st.sampled_from(sorted(tensors)))
    before = tensors.pop(name)
    other = CHANGES[change](before)
    assume(other is None or other.shape != before.shape or other.dtype is not before.dtype)
    if other is not None:
        tensors[name] = other.contiguous()
    may_lack = change == "gone" and name.rpartition(".")[2] in ("mean", "first", "along")
    wider = change == "double" and name.rpartition(".")[2] in ("keys", "values")
    # how many channels a model's values have is for its attention to say
    alone = change == "fewer channels" and name.rpartition(".")[2] in ("keys", "values", "value_codes")
    assert bool(answer(kind, forged(tensors, about))) != (may_lack or wider) or alone


@pytest.mark.parametrize("start", [-1, 24, 2**40])
def test_sequences_that_begin_outside_of_the_cache_are_refused(start: int) -> None:
    tensors, about = parts(saved("streaming codes")[1])
    tensors["0.starts"][1] = start
    assert "begins its sequences at" in answer("streaming codes", forged(tensors, about))


@pytest.mark.parametrize("kind", ["numbers", "streaming codes"])
def test_tensors_under_other_names_are_refused(kind: str) -> None:
    tensors, about = parts(saved(kind)[1])
    one = next(iter(tensors))
    for name in ("2.keys", "0.keyz", "keys", "0.5.key_codes", "0.", "\u202e", one + "."):
        assert answer(kind, forged({**tensors, name: tensors[one].clone()}, about))


DEEP = "[" * 200_000


@pytest.mark.parametrize(("data", "words"), [
    (b"", "is no safetensors file"), (b"words that are no cache", "is no safetensors file"),
    (save({"0.keys": torch.zeros(1)}), "without a cache"), (save({}, {disk._KEY: "{"}), "is no JSON"),
    (save({}, {disk._KEY: DEEP}), "is no JSON"), (save({}, {disk._KEY: "9" * 9999}), "is no JSON"),
    (save({}, {disk._KEY: "[]"}), r"got format \[\], expected 4"),
    (save({}, {disk._KEY: '{"version": 3, "layers": []}'}), "got format 3, expected 4; read the prompt again"),
    (save({}, {disk._KEY: '{"version": 4}'}), "is damaged"),
], ids=["empty", "words", "tensors", "cut", "deep", "digits", "list", "older", "bare"])  # fmt: skip
def test_files_of_another_kind_are_named(data: bytes, words: str) -> None:
    said = answer("numbers", data)
    assert re.search(words, said), said


def test_no_file_and_a_directory_are_told_apart(tmp_path: Path) -> None:
    model = saved("numbers")[0]
    with pytest.raises(FileNotFoundError):
        adaattn_hf.load_cache(tmp_path / "absent", model)
    with pytest.raises(ValueError, match=r"path: .* is no safetensors file .*expected one that save_cache wrote"):
        adaattn_hf.load_cache(tmp_path, model)
    with pytest.raises(TypeError, match="model: got 'name', expected a loaded model"):
        adaattn_hf.load_cache(tmp_path / "absent", "name")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["numbers", "codes", "streaming codes"])
def test_more_tokens_than_there_may_be_are_refused_when_they_are_read(kind: str, tmp_path: Path) -> None:
    model, data = saved(kind)
    (tmp_path / "cache").write_bytes(data)
    with pytest.raises(ValueError, match="max_cache_len: got 22, expected at least 23"):
        adaattn_hf.load_cache(tmp_path / "cache", model, max_cache_len=22)
    assert adaattn_hf.load_cache(tmp_path / "cache", model, max_cache_len=23).get_seq_length() == 23


def test_layers_without_keys_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    model = models("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, AutoModelForCausalLM).ours
    cache = adaattn_hf.AdaAttnCache(model, "model")
    with torch.no_grad():
        model(torch.arange(12)[None], **with_cache(model, cache))
    with pytest.raises(TypeError, match=r"layer \d is a LinearAttentionLayer, expected layers of full or sliding"):
        adaattn_hf.save_cache(cache, tmp_path / "cache")
    with pytest.raises(TypeError, match="cache: got DynamicCache, expected an AdaAttnCache"):
        adaattn_hf.save_cache(DynamicCache(), tmp_path / "cache")  # type: ignore[arg-type]


def test_an_empty_cache_and_one_that_was_emptied_are_kept(tmp_path: Path) -> None:
    model = saved("numbers")[0]
    for stored in ("model", "int8"):
        cache = adaattn_hf.AdaAttnCache(model, stored)
        empty = bytes_of(cache, model)
        assert parts(empty)[0] == {}
        with torch.no_grad():
            model(torch.arange(12)[None], **with_cache(model, cache))
        cache.crop(-12)
        assert parts(bytes_of(cache, model)) == parts(empty)
        (tmp_path / "cache").write_bytes(empty)
        assert adaattn_hf.load_cache(tmp_path / "cache", model).get_seq_length() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    from ..unit.test_broken_files import room_for

    model, data = saved("numbers")
    path = tmp_path / "cache"
    path.write_bytes(data)
    longer = copy.deepcopy(adaattn_hf.load_cache(path, model))
    longer.batch_repeat_interleave(8)
    with room_for(len(data)), pytest.raises(OSError, match="too large"):
        adaattn_hf.save_cache(longer, path, model)
    assert path.read_bytes() == data
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
