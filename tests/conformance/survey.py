"""Takes every family of the installed Transformers, tiny, through every door, and writes the table of its answers.

    python tests/conformance/survey.py --write docs [FAMILY ...]

A family works at a door, is refused there in one sentence of ours, or fails as with stock attention. All else is raw:
the program names it, and ends with 1. `tests/model/breadth.yaml` has what a configuration needs besides usual sizes.
"""

import argparse
import copy
import inspect
import json
import linecache
import multiprocessing
import multiprocessing.pool
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from huggingface_hub.errors import StrictDataclassError  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.models.auto import modeling_auto as auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from adaattn_hf import check, explain, prepare  # noqa: E402
from adaattn_hf._files import write_atomically  # noqa: E402
from adaattn_hf.eval.provenance import commit  # noqa: E402
from tests.support.families import LISTED  # noqa: E402
from tests.support.models import build, main_output, padding, sized, tokens  # noqa: E402

KINDS: dict[str, Any] = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image and text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, "other": auto.MODEL_MAPPING_NAMES,
}  # fmt: skip
"""Classes of a family's models, by kind; the first kind that has the family counts."""
OURS = tuple(str(ROOT / name) for name in ("adaattn_hf", "patches"))
MOST, LIMIT_S = 70_000_000, 120.0
"""Parameters beyond which a model is not small, and seconds that a family may take."""
YES, ALIKE, RAW = "yes", "as stock: ", "raw: "
FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, StopIteration,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip

Answers = dict[str, str]
"""Door (or `kind`, `class`, `untried`) -> what was answered."""


def variants(family: str, config_class: Any) -> Iterator[dict[str, Any]]:
    """What a tiny configuration may have besides the usual sizes: a layer of each kind, or what its class chooses."""
    listed: dict[str, Any] = next((names[family] for names in LISTED.values() if family in names), {})
    types = list(dict.fromkeys(getattr(config_class(), "layer_types", None) or ()))
    if len(types) > 1 and "layer_types" not in listed:
        yield {"num_hidden_layers": len(types), "layer_types": types, **listed}
    yield listed


def inputs_of(model: Any) -> dict[str, Any]:
    """Small inputs for what a model reads first."""
    config, name = model.config, model.main_input_name
    takes = inspect.signature(type(model).forward).parameters
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 16
    height, width = (size, size) if isinstance(size, int) else size
    given = {
        "input_ids": tokens(), "pixel_values": torch.randn(3, getattr(vision, "num_channels", 3), height, width),
        "input_features": torch.randn(3, getattr(config, "num_mel_bins", 80), 60), "input_values": torch.randn(3, 2000),
    }  # fmt: skip
    found: dict[str, Any] = {name: given[name]} | ({"input_ids": tokens()} if "input_ids" in takes else {})
    if "pixel_values" in takes and not model.can_generate():
        found["pixel_values"] = given["pixel_values"]  # two towers
    if name == "input_ids" and "attention_mask" in takes:
        found["attention_mask"] = padding("right")
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        found["decoder_input_ids"] = tokens()[:, :6]
    return found


def answer_of(model: Any, given: dict[str, Any]) -> Tensor:
    """The main output of a model for inputs, or its first tensor of numbers."""
    torch.manual_seed(0)
    out = model(**given)
    try:
        return main_output(out)
    except TypeError:
        parts = [part for value in out.values() for part in (value if isinstance(value, (tuple, list)) else [value])]
        return next(part for part in parts if isinstance(part, Tensor) and part.is_floating_point())


def said(error: BaseException) -> str:
    """An error in one line; `raw` in front of what is no single sentence that our code raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    statement = linecache.getline(last.filename, last.lineno or 0).strip()
    ours, text = last.filename.startswith(OURS) and statement.startswith("raise "), str(error).strip()
    line = " ".join(f"{type(error).__name__}: {text}".split())[:600]
    return line if ours and text and "\n" not in text else f"{RAW}{line}"


def tried(ours: Callable[[], str], stock: Callable[[], Any] = lambda: None) -> str:
    """What a door answers; an error that stock attention raises as well is Transformers' own."""
    try:
        return ours()
    except FOREIGN as error:
        answer = said(error)
    if answer.startswith(RAW):
        try:
            stock()
        except FOREIGN as error:
            if said(error) == answer:
                return ALIKE + answer.removeprefix(RAW)
    return answer


def done(do: Callable[[Any], None], thing: Any) -> str:
    """`yes` where nothing is raised."""
    do(thing)
    return YES


def near(expected: Tensor, actual: Tensor, mask: Tensor | None) -> str:
    """`yes` for equal numbers at real tokens."""
    if actual.shape != expected.shape:
        return f"{RAW}shape {tuple(actual.shape)}, stock's is {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).abs()
    if mask is not None and difference.shape[:2] == mask.shape:
        difference = difference[mask.bool()]
    off = float(difference.max()) / max(float(expected.abs().max()), 1e-30)
    return YES if off < 1e-3 else f"{RAW}off by {off:.0e} of the largest value"


def explained(model: Any) -> str:
    """`yes` for an explanation of every phase."""
    found = explain(model)
    return next(iter(found.unknown), YES if found.layers else "no attention layer calls the interface")


def built(family: str, cls: type[tf.PreTrainedModel]) -> tuple[Any, Any, dict[str, Any], Tensor]:
    """A configuration, the stock model, inputs and its answer (one of `FOREIGN`: no small model runs)."""
    failed: BaseException = ValueError(family)
    config_class = CONFIG_MAPPING[family]
    if cls.config_class is not None and not issubclass(config_class, cls.config_class):
        config_class = type(config_class().get_text_config())  # a family whose text part alone predicts tokens
    for changes in variants(family, config_class):
        try:
            config = sized(config_class, changes)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
            if size > MOST:
                raise ValueError(f"{size:,} parameters")
            stock = build(cls, config, "eager").stock
            given = inputs_of(stock)
            expected = answer_of(stock, given)
            if not torch.isfinite(expected).all():
                raise ValueError("stock's answer is not finite")
            return config, stock, given, expected
        except FOREIGN as error:
            failed = error
    raise failed


@torch.no_grad()
def answers(family: str) -> Answers:
    kind = next(kind for kind, names in KINDS.items() if family in names)
    name = KINDS[kind][family]
    cls = getattr(tf, name if isinstance(name, str) else name[0], None)
    if cls is None:
        return {"kind": kind, "untried": f"Transformers does not export {name}"}
    found = {"kind": kind, "class": cls.__name__}
    try:
        config, stock, given, expected = built(family, cls)
    except FOREIGN as error:
        found["untried"] = said(error).removeprefix(RAW)
        found["check"] = tried(lambda: done(check, CONFIG_MAPPING[family]()), CONFIG_MAPPING[family])
        return found
    found["check"] = tried(lambda: done(check, config))
    models: list[Any] = []
    found["load"] = tried(lambda: done(models.append, build(cls, config).ours))
    if not models:
        return found
    model, mask = models[0], given.get("attention_mask")
    found["check"] = tried(lambda: done(check, model))
    found["forward"] = tried(lambda: near(expected, answer_of(model, given), mask))
    found["explain"] = tried(lambda: explained(model))
    if stock.can_generate():
        prompt = {**given, "attention_mask": padding("left")} if mask is not None else given
        asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        asked |= {name: value for name, value in prompt.items() if name != "decoder_input_ids"}

        def generated() -> str:
            same = model.generate(**asked).tolist() == stock.generate(**asked).tolist()
            return YES if same else f"{RAW}other tokens than stock's"

        found["generate"] = tried(generated, lambda: stock.generate(**asked))
    if mask is not None:
        found["prepare"] = tried(lambda: near(expected, answer_of(prepare(model), given), mask))
    return found


def child(family: str, answer: Any) -> None:
    warnings.simplefilter("ignore")
    tf.logging.set_verbosity(60)
    torch.set_num_threads(1)
    answer.send(answers(family))


def surveyed(family: str) -> Answers:
    """A family in a process of its own, so that none changes, blocks or kills another."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=child, args=(family, sender))
    process.start()
    sender.close()
    try:
        found: Answers = receiver.recv() if receiver.poll(LIMIT_S) else {"untried": "it took too long"}
    except EOFError:
        found = {"untried": f"{RAW}its process died"}
    process.kill()
    process.join()
    print(family, found.get("untried", ""), flush=True)
    return found


def raw(families: dict[str, Answers]) -> list[str]:
    """Answers that are none of ours and none of stock's; a bare `KeyError: 'adaattn'` comes before we are asked."""
    return [
        f"{family}: {door}: {answer}" for family, doors in families.items() for door, answer in doors.items()
        if answer.startswith(RAW) and not (door == "load" and answer == f"{RAW}KeyError: 'adaattn'")
    ]  # fmt: skip


def reasons(answer: str, cls: str) -> list[str]:
    """What an answer says, reason by reason and without the names of one model."""
    if answer.startswith(ALIKE):
        return ["fails with stock attention, too"]
    text = re.sub(r"^[A-Z]\w+: ", "", answer).replace("<", "&lt;")
    unpadded = re.match(r"unpad: .*? without its padding: (.*)\. Use prepare.*", text)
    if unpadded is None:
        return [text.replace(cls, "the model")]
    text = re.sub(r"\w+\.forward", "its forward", unpadded[1]).replace("); prepare the", "), prepare the")
    return re.sub(r" by \S+ of its largest value", "", text).split("; ")


def page(record: dict[str, Any]) -> str:
    families: dict[str, Answers] = record["families"]
    numbers: dict[str, int] = {}

    def cell(doors: Answers, door: str) -> str:
        if (answer := doors.get(door, "–")) in ("–", YES):
            return answer
        told = [numbers.setdefault(one, len(numbers) + 1) for one in reasons(answer, doors["class"])]
        return f"no ([{', '.join(map(str, sorted(told)))}](#reasons))"

    parts: dict[str, list[str]] = {"served": [], "refused": [], "untried": []}
    for name, doors in families.items():
        bad = doors.get("load", YES) != YES or not doors.get("check", YES).startswith((YES, ALIKE))
        parts["refused" if bad else "untried" if "untried" in doors else "served"].append(name)
    tables = []
    for kind in KINDS:
        tables += [f"## Supported: {kind}\n", "| model type | equals stock | `explain` | `prepare` | `generate` |"]
        tables += ["|---|---|---|---|---|"]
        for name in parts["served"]:
            if families[name]["kind"] == kind:
                cells = (cell(families[name], door) for door in ("forward", "explain", "prepare", "generate"))
                tables.append(f"| `{name}` | {' | '.join(cells)} |")
        tables.append("")
    refused = []
    for name in parts["refused"]:
        why = re.search(r"which (.*?), so that", families[name].get("check", ""))
        bare = "" if families[name].get("load", YES) == YES else ": `KeyError: 'adaattn'` when it loads"
        refused.append(f"| `{name}` | {why[1] if why else families[name]['check']}{bare} |")
    return Template((Path(__file__).parent / "supported.md").read_text(encoding="utf-8")).substitute(
        {name: record[name] for name in ("transformers", "torch", "commit")},
        **{name: len(names) for name, names in parts.items()}, tables="\n".join(tables),
        reasons="\n".join(f"{number}. {one}" for one, number in numbers.items()), not_supported="\n".join(refused),
        not_tried=", ".join(f"`{name}`" for name in parts["untried"]),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument("--write", type=Path, help="the docs whose page is to be written")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    asked = args.families or sorted({name for names in KINDS.values() for name in names if name in CONFIG_MAPPING})
    made = commit(ROOT / "adaattn_hf")
    with multiprocessing.pool.ThreadPool(args.jobs) as pool:
        families = dict(zip(asked, pool.map(surveyed, asked, chunksize=1), strict=True))
    versions = {name: metadata.version(name) for name in ("transformers", "torch")}
    record = {**versions, "commit": made, "families": families}
    if args.write is not None:
        write_atomically(args.write / "results" / "supported.json", json.dumps(record, indent=1) + "\n")
        write_atomically(args.write / "supported.md", page(record))
    print("\n".join(raw(families)) or f"{len(families)} families: nothing is raw")
    sys.exit(1 if raw(families) else 0)


if __name__ == "__main__":
    main()
