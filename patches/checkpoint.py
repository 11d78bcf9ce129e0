"""Loads a checkpoint with its tokenizer, and makes copies of a model that share weights but differ in attention."""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, get_args

import torch
import transformers as tf
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from adaattn_hf.backends.select import BackendRefusal, check_may_run_here
from adaattn_hf.errors import ModelUnavailable, UsageError, memory_is_full, nearest, unknown
from adaattn_hf.plans.plan import Plan, PlanError
from adaattn_hf.plans.store import CONFIG_KEY, PLAN_FILE, TENSORS_FILE

from .models.positions import trained_positions
from .plans.attach import load_carried, load_plan, remove_plan
from .plans.bound import carried_by
from .registry import NAMES

Objective = Literal["causal", "masked"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
_TOLD = (OSError, ValueError, ImportError)
"""Errors by which Transformers says in words that a checkpoint is missing, broken or needs a package."""
_TRUSTED = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError,
    SafetensorError, StrictDataclassError, UnpicklingError,
)  # fmt: skip
"""What else comes of files that are cut off, damaged or do not fit one another: Transformers takes them as they are."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    objective: Objective

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> str:
        """The weights' dtype, as `float32`."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def max_length(self) -> int | None:
        """The longest input that the configuration allows, in tokens; None if it does not say."""
        return trained_positions(self.model.config)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids  # type: ignore[no-any-return]

    def pad_token(self) -> int:
        """Returns the token for padding (which is masked): the tokenizer's, else EOS, else 0."""
        tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(int(token) for token in tokens if token is not None)


def resolve_dtype(name: str) -> torch.dtype | str:
    """Returns the dtype of a name, or `auto` for the checkpoint's own."""
    if name == "auto":
        return "auto"
    if name not in DTYPES:
        raise UsageError(unknown("dtype", name, [*DTYPES, "auto"]))
    return DTYPES[name]


def dtype_for(dtype: str | None, plans: Sequence[str | None], config: Any, default: str) -> str:
    """Returns the dtype that a model is loaded in: as asked, else that of its plans, else the default.

    A plan is a file, a directory or an id, `NO_PLAN`, or None for the one in the configuration. One of another dtype is
    a UsageError, one that cannot be read ModelUnavailable.
    """
    user_dtype, carried = dtype, carried_by(config.get_text_config()).get(CONFIG_KEY)
    for plan in plans:
        if plan == NO_PLAN or (plan is None and carried is None):
            continue
        with _binding(plan):
            planned = (Plan.from_dict(carried) if plan is None else Plan.from_pretrained(plan)).dtype
        kind = resolve_dtype(dtype or planned)
        if ((config.dtype or torch.float32) if kind == "auto" else kind) is not DTYPES[planned]:
            remedy = f"give --dtype {planned}, or leave --dtype out" if user_dtype else "give plans of one dtype"
            raise UsageError(
                f"dtype: got {dtype}, and the plan {plan or 'in the configuration'} was calibrated in {planned}; "
                f"{remedy}"
            )
        dtype = planned
    return dtype or default


def resolve_device(name: str | None, *, here: bool = True) -> torch.device:
    """Returns the device of a name, by default or with `auto` CUDA if available, else the CPU.

    UsageError: there is no such device, or with `here` no such CUDA device.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    if name is None or name == "auto":
        return torch.device(default)
    count = torch.cuda.device_count() if default == "cuda" else 0
    names = ["auto", "cpu", *["cuda"][:count], *(f"cuda:{index}" for index in range(count))]
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    names += [other.type] if other is not None and other.type != "cuda" else []
    if name in names or (not here and re.fullmatch(r"cuda(:\d{1,2})?", name)):
        return torch.device(name)
    devices = f"{count or 'no'} CUDA device{'s' * (count != 1)}"
    expected = f"{' or '.join(names)}, since torch sees {devices} here" if here else "cpu, cuda or cuda:1, say"
    raise UsageError(f"device: got {name!r}, expected {expected}; give --device {default}")


def placed(model: Any, device: str | None) -> Any:
    """The model where `resolve_device` says; `auto` shares its layers among GPUs by accelerate (else UsageError)."""
    if device != "auto" or torch.cuda.device_count() < 2:
        return model.to(resolve_device(device))
    if find_spec("accelerate") is None:
        raise UsageError("device: got 'auto' for several GPUs without accelerate, expected it: pip install accelerate")
    import accelerate

    whole: dict[str, Any] = {"no_split_module_classes": sorted(model._no_split_modules or ())}
    places = accelerate.infer_auto_device_map(
        model, max_memory=accelerate.utils.get_balanced_memory(model, **whole), **whole
    )
    return accelerate.dispatch_model(model, places, skip_keys="past_key_values")


def _objective(config: Any, objective: str, name: str) -> Objective:
    """What is asked for, else what a checkpoint was saved to predict: by its architectures, else by its family."""
    if objective != "auto":
        if objective not in get_args(Objective):
            raise UsageError(unknown("objective", objective, ("auto", *get_args(Objective))))
        return objective  # type: ignore[return-value]
    saved = _architectures(config)
    if any(name.endswith("ForMaskedLM") for name in saved):
        return "masked"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in saved):
        return "causal"
    if type(config) in tf.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return "masked"
    # a GGUF file names no class; weights of a head that are not there are refused once they are missed
    if not saved and type(config) in tf.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "causal"
    raise ModelUnavailable(
        f"model: got {name}, saved as {_saved_as(config)}, expected a model with a language-model head (…ForCausalLM, "
        "…LMHeadModel, …ForMaskedLM): without one there is no nll. Give a checkpoint that was saved with its head, or "
        "say --objective causal|masked if the weights are there"
    )


def _architectures(config: Any) -> list[str]:
    # as a file says them, which nobody has checked
    return [*map(str, config.architectures)] if isinstance(config.architectures, list) else []


def _saved_as(config: Any) -> str:
    return ", ".join(_architectures(config) or ["nothing that its config names"])


def prefix_token(tokenizer: Any, name: str) -> int:
    """Returns the token before a document: BOS, else EOS, as in lm-evaluation-harness; UsageError without either."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UsageError(
        "windows: got 'rolling', which puts a prefix token before each document, but the tokenizer of "
        f"{name} has neither BOS nor EOS; pass --prefix-token ID, --tokenizer with one that has, or "
        "--windows strided"
    )


def read_config(model: str | Path, **source: Any) -> Any:
    """Returns the configuration of a checkpoint that has weights; ModelUnavailable for no model, or only a plan."""
    files = {path.name for path in Path(model).glob("*.*")} - {TENSORS_FILE}
    if PLAN_FILE in files and not any(name.endswith((".safetensors", ".bin", ".gguf")) for name in files):
        raise ModelUnavailable(
            f"model: {str(model)!r} holds a plan and no weights; give the model that the plan was made for, and the "
            f"plan by --plan {model} or adaattn_hf.load_plan"
        )
    if "/" not in str(model) and _neighbour(model):  # misspelt: the Hub is not asked, which takes long to fail
        source["local_files_only"] = True
    with _reading(lambda error: _not_loaded(model, error)):
        return tf.AutoConfig.from_pretrained(model, **source)


@contextmanager
def _reading(sentence: Callable[[Exception], str]) -> Iterator[None]:
    # files of a checkpoint are read by Transformers; memory that is full is no fault of theirs
    try:
        yield
    except (*_TOLD, *_TRUSTED) as error:
        if memory_is_full(error):
            raise
        raise ModelUnavailable(sentence(error)) from error


def load(
    model: str | Path,
    *,
    dtype: str | None = None,
    plans: Sequence[str | None] = (),
    device: str | None = None,
    tokenizer: str | None = None,
    objective: str = "auto",
    implementation: str | None = None,
    prefixed: bool = False,
    **source: Any,
) -> Checkpoint:
    """Loads a checkpoint from the hub or a directory, in evaluation mode.

    `plans` are as for `dtype_for`, whose default is float32 here. An implementation of None leaves it to Transformers.
    `source` may name `revision`, `gguf_file` and `trust_remote_code`, as Transformers takes them.
    With `prefixed` a causal model without a token to put before documents is refused before its weights are read.
    ModelUnavailable where model, tokenizer, head or named backend are not to be had; else UsageError.
    """
    _refuse_impossible(implementation)
    name = Path(model).resolve().name if Path(model).exists() else str(model)
    resolve_dtype(dtype or "auto")
    resolve_device(device)  # one that is missing is refused before weights are read
    source = {key: value for key, value in source.items() if value}
    elsewhere = {key: value for key, value in source.items() if key != "gguf_file"}
    config = read_config(model, **source)
    torch_dtype = resolve_dtype(dtype_for(dtype, plans, config, "float32"))
    kind = _objective(config, objective, name)
    named, place = tokenizer or model, elsewhere if tokenizer else source
    remedy = "put a tokenizer's files there, or name another one by --tokenizer where a command takes it"
    with _reading(lambda error: f"tokenizer: cannot load {str(named)!r}: {why_not(named, error)}; {remedy}"):
        tokens = tf.AutoTokenizer.from_pretrained(named, **place)
    if prefixed and kind != "masked":
        prefix_token(tokens, name)
    auto: Any = tf.AutoModelForMaskedLM if kind == "masked" else tf.AutoModelForCausalLM
    attention = {} if implementation is None else {"attn_implementation": implementation}
    with _reading(lambda error: _not_loaded(model, error)):
        result: Any = auto.from_pretrained(model, dtype=torch_dtype, output_loading_info=True, **attention, **source)
    loaded, report = result
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelUnavailable(
            f"model: got {name!r}, saved as {_saved_as(config)} "
            f"without {len(missing)} weights of its language-model head ({missing[0]}, …), which would be random; "
            "expected a checkpoint saved with its head (…ForMaskedLM, …ForCausalLM): without predictions there is no "
            "loss. Take the checkpoint that this one was made from; a plan of its goes with "
            "adaattn_hf.load_plan(model, directory)"
        )
    return Checkpoint(name, placed(loaded.eval(), device), tokens, kind)


def _not_loaded(model: str | Path, error: Exception) -> str:
    files = sorted(path.name for path in Path(model).glob("*.gguf")) if Path(model).is_dir() else []
    return (
        f"model: cannot load {str(model)!r}: {why_not(model, error)}. Expected a hub id that can be reached or is "
        "cached, or a directory that save_pretrained wrote (a GGUF file needs --gguf-file"
        f"{' '.join(['', *files[:1]])})"
    )


def why_not(model: str | Path, error: Exception) -> str:
    """Returns why a checkpoint was not loaded; for a missing path Transformers complains about a bad id."""
    name = str(model)
    path = isinstance(model, Path) or name.startswith(("/", ".", "~")) or name.count("/") > 1
    if near := _neighbour(model):
        return f"there is no directory {name}; did you mean {near}? A model of the Hub: owner/NAME"
    if path and not Path(model).expanduser().exists():
        return "there is no such directory"
    return _first_line(error)


def _neighbour(model: str | Path) -> str:
    path = Path(model).expanduser()
    names = [] if path.exists() else [file.parent.name for file in path.parent.glob("*/config.json")]
    near = nearest(path.name, names, 0.75)
    return near and str(path.parent / near)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    return words if words and isinstance(error, _TOLD) else f"{type(error).__name__}{words and ': '}{words}"


def known_implementations() -> list[str]:
    """Returns all attention implementations that Transformers knows now, `eager` and all of ours included."""
    registry: Any = tf.AttentionInterface()
    return sorted({"eager", *registry.valid_keys(), *NAMES})


def _refuse_impossible(implementation: str | None) -> None:
    """Refuses a backend that can serve nothing here (ModelUnavailable); Transformers would not say why."""
    if (forced := NAMES.get(implementation or "")) is not None:
        try:
            check_may_run_here(forced)
        except BackendRefusal as error:
            raise ModelUnavailable(f"attention implementation: {implementation!r}: {error}") from error


NO_PLAN = "none"
"""Given in place of a plan: run without the plan that the model carries."""


def with_attention(checkpoint: Checkpoint, implementation: str, plan: str | None = None) -> Any:
    """Returns a model (an arm of a comparison) with another attention implementation and the checkpoint's parameters.

    It has its own modules, configuration and buffers, so that no arm can affect another; the parameters are the same
    tensors, held in memory once. A plan is a file or directory, `NO_PLAN`, or None for the model's own.
    ModelUnavailable for an implementation that is unknown or refused, or a plan of another model.
    """
    names = known_implementations()
    if implementation not in names and "/" not in implementation:
        raise ModelUnavailable(unknown("attention implementation", implementation, names))
    _refuse_impossible(implementation)
    model = copy.deepcopy(checkpoint.model, {id(p): p for p in checkpoint.model.parameters()})
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError, NotImplementedError) as error:
        raise ModelUnavailable(
            f"attention implementation: {checkpoint.name} refuses {implementation!r}: {_first_line(error)}"
        ) from error
    give_plan(model, plan)
    return model.eval()


def give_plan(model: Any, plan: str | None) -> None:
    """Binds a plan to a model, or the one in its configuration (None), or takes that away (`NO_PLAN`).

    ModelUnavailable: it cannot be read, or is that of another model.
    """
    with _binding(plan):
        if plan == NO_PLAN:
            remove_plan(model)
        elif plan is None:
            load_carried(model)
        else:
            load_plan(model, plan)


@contextmanager
def _binding(plan: str | None) -> Iterator[None]:
    try:
        yield
    except (PlanError, OSError) as error:
        raise ModelUnavailable(f"plan: {plan!r}: {str(error).removeprefix('plan: ')}") from error
