"""How a command says its options: a dataclass with a field for each, of which typer reads a signature.

    @dataclass(frozen=True, kw_only=True)
    class Copy(Options):
        '''Copy a file.

        Exit codes: 0 done; 2 wrong arguments.
        '''

        file: Path = argument(..., "File to copy.")
        times: int = option(1, "Copies to make.", least=1)

Nothing here loads torch, so that help and mistakes in options do not wait for it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

Settings = TypeVar("Settings")
PLAN_DIRECTORY = "adaattn-plan"
"""Where a plan goes, and where commands look for one, if nothing is said."""
DEMO_DIRECTORY = "adaattn-plan-demo"
"""Where that of the packaged model goes: commands do not take it for the plan of another model."""
AIMS = ("prompt", "step", "memory")
CACHES = ("model", "int8", "k8v4")
DTYPES = ("float32", "bfloat16", "float16", "auto", "fp32", "bf16", "fp16")
FAMILIES = ("window", "bf16", "int8", "rank")
OBJECTIVES = ("auto", "causal", "masked")
PADDINGS = ("none", "right", "left")
RECIPES = ("rolling", "strided")


class Done(NamedTuple):
    """How a command ended: what `--json` prints, JSON text or a value, None for nothing; and the exit code."""

    result: Any = None
    code: int = 0


def option(
    default: Any,
    text: str,
    *names: str,
    choices: tuple[str, ...] = (),
    read: Callable[[str, str], Any] | None = None,
    least: int | None = None,
) -> Any:
    """Returns a field that is an option, with its default (`...`: it has none) and its help.

    A field that is a tuple may be given several times.

    Args:
        default: Value where the option is not given.
        text: What `--help` says of it.
        names: Names, where it is not `--` and the field's.
        choices: The words that it takes, which the shell completes.
        read: Makes the value of the text and of the option's name; ValueError for what it cannot read.
        least: The smallest number that it takes.
    """
    return _field(default, help=text, names=names, choices=choices, read=read, least=least)


def argument(default: Any, text: str) -> Any:
    """Returns a field that is an argument, found by its place; as `option`."""
    return _field(default, help=text, names=None, choices=(), read=None, least=None)


def _field(default: Any, **about: Any) -> Any:
    return dataclasses.field(metadata=about) if default is ... else dataclasses.field(default=default, metadata=about)


def tokens(text: str, name: str = "lengths") -> tuple[int, ...]:
    """Returns length bins: `4096,8192`, or `4k,8k` for the same; ValueError for what is no number of tokens."""
    lengths = []
    for part in text.split(","):
        number = part.strip().lower()
        digits = number.removesuffix("k")
        if not digits.isdecimal():
            raise ValueError(f"{name} is {text!r}, expected numbers of tokens by commas, such as 4096,8192 or 4k,8k")
        lengths.append(int(digits) * (1024 if digits != number else 1))
    return tuple(lengths)


def share(text: str, name: str) -> float:
    """Returns a share as people write it: `40%`, `0.4` or `0.4x`; all else is a ValueError."""
    number = text.strip()
    unit, parts = ("%", 100.0) if number.endswith("%") else ("x", 1.0)
    try:
        return float(number.removesuffix(unit)) / parts
    except ValueError as error:
        raise ValueError(f"{name} is {text!r}, expected a share such as 99%, 0.99 or 0.99x") from error


def words(text: str, name: str) -> tuple[str, ...]:
    """Returns words by commas, `window,bf16` say; ValueError if there is none."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError(f"{name} is {text!r}, expected some of {','.join(FAMILIES)}")
    return parts


@dataclass(frozen=True, kw_only=True)
class Options:
    """A command: its fields are its options, its docstring is its help, the last paragraph of it the exit codes."""

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Title of a part of the help page to the options in it, in order; what none names is in the last part."""
    others: ClassVar[Mapping[str, bool]] = {}
    """What click does with words that are no options of the command."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """The options as parameters of a function, as typer reads them: by panels, then those of bases last."""
        panels = {name: panel for panel, names in cls.panels.items() for name in names}
        order, bases = [*panels], cls.__mro__
        kinds = get_type_hints(cls)

        def place(one: dataclasses.Field[Any]) -> tuple[int, int]:
            depth = next(at for at, base in enumerate(bases) if one.name in inspect.get_annotations(base))
            return order.index(one.name) if one.name in panels else len(order), depth

        panel = "Advanced" if panels else None
        return [
            _parameter(one, kinds[one.name], panels.get(one.name, panel))
            for one in sorted(dataclasses.fields(cls), key=place)
        ]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Returns the options that typer read; ValueError for a mistake in them."""
        given = {}
        for one in dataclasses.fields(cls):
            value, read = values[one.name], one.metadata["read"]
            if value is None or value == []:
                continue
            if read is not None:
                value = read(value, _name(one).strip("-").replace("-", "_"))
            given[one.name] = tuple(value) if isinstance(value, list) else getattr(value, "value", value)
        return cls(**given)

    def fill(self, settings: Callable[..., Settings], **others: Any) -> Settings:
        """Returns settings whose fields are the options of the same names, where these were given, or `others`."""
        names = [one.name for one in dataclasses.fields(cast(Any, settings))]
        given = {name: value for name in names if (value := getattr(self, name, None)) not in (None, ())}
        return settings(**{**given, **others})


def _name(one: dataclasses.Field[Any]) -> str:
    return (one.metadata["names"] or (f"--{one.name.replace('_', '-')}",))[0]


def _parameter(one: dataclasses.Field[Any], kind: Any, panel: str | None) -> inspect.Parameter:
    about, default = one.metadata, inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default
    text, choices, metavar = about["help"], about["choices"], None
    if about["read"] is not None:
        kind, default = str | None, None
    elif get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], None if default == () else default  # type: ignore[misc]
        kind = kind | None if default is None else kind
    elif choices:
        kind = cast(Any, Enum)(one.name, [(word, word) for word in choices])
        text, metavar = f"{text} One of {', '.join(choices)}.", "<word>"
        kind, default = (kind | None, None) if default is None else (kind, kind(default))
    if about["names"] is None:
        info: Any = typer.Argument(help=text)
    else:
        # a flag is not said in two ways: what is off by default is turned on
        names = about["names"] or ((_name(one),) if kind is bool and default is False else ())
        least = about["least"]
        metavar = "<int>" if least is not None else metavar  # the table of help has no room for bounds
        info = typer.Option(*names, help=text, min=least, metavar=metavar, rich_help_panel=panel)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


@dataclass(frozen=True, kw_only=True)
class Json(Options):
    """The option of commands that report results."""

    as_json: bool = option(False, "Print JSON; everything else goes to stderr.", "--json")


@dataclass(frozen=True, kw_only=True)
class Threads(Options):
    """The option of commands that compute."""

    threads: int | None = option(None, "CPU threads for torch.")


@dataclass(frozen=True, kw_only=True)
class Source(Options):
    """Which checkpoint is read, and where it runs."""

    device: str | None = option(None, "cpu, cuda, cuda:1, or auto: layers on all GPUs. Default: cuda if there is one.")
    revision: str | None = option(None, "Revision of a hub model.")
    gguf_file: str | None = option(None, "GGUF file within MODEL.")
    trust_remote_code: bool = option(False, "Allow code from the model's repository.")

    def source(self) -> dict[str, Any]:
        """What says which checkpoint, where it is given, as Transformers takes it."""
        every = ("revision", "gguf_file", "trust_remote_code")
        return {name: value for name in every if (value := getattr(self, name))}


@dataclass(frozen=True, kw_only=True)
class Loading(Source):
    """How a checkpoint is loaded."""

    dtype: str | None = option(
        None, "Of the weights; auto: the checkpoint's. Default: the plan's, else float32.", choices=DTYPES
    )
    tokenizer: str | None = option(None, "Tokenizer, where it is not the model's own.")
    objective: str = option("auto", "How the model is read; auto: as its configuration says.", choices=OBJECTIVES)

    def loading(self) -> dict[str, Any]:
        """What says how a checkpoint is loaded, as `patches.checkpoint.load` takes it."""
        how = {name: getattr(self, name) for name in ("device", "dtype", "tokenizer", "objective")}
        return {**self.source(), **how}


@dataclass(frozen=True, kw_only=True)
class Judged(Options):
    """By which text and limits a plan is judged, and how a masked-language model is read."""

    seed: int = option(0, "Seed of every random choice: the text sample, the labels, the rows and the needles.")
    sequences: int = option(4, "Sequences per length that risks are measured on.")
    joint: int = option(3, "Sequences per length that re-scale the risks, by measuring whole plans.")
    held_out: int = option(24, "Held-out sequences per length, fewer where the text holds fewer.")
    top1: float | None = option(
        None, "Least agreement on the likeliest token (99%). Default: the budget's.", read=share
    )
    max_kl: float | None = option(None, "Largest mean KL, nats/token (1e-3), where it is to be less than the budget.")
    needles_lost: float | None = option(
        None, "Share of the needles that may be lost (2%). Default: 2% beyond chance.", "--needles", read=share
    )
    mask_share: float = option(0.15, "Share of the tokens that a masked LM is asked for at a time.")
    maskings: int = option(4, "Times that each sequence is masked anew, for a masked LM.")
