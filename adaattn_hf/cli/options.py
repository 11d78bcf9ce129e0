"""Reads the options of the commands that make plans; mistakes are reported before a model is loaded."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch

from ..policy.candidates import known_families, refuse_unknown
from ..policy.prices import PriceTable


def nats(budget: str) -> float:
    """Returns a budget in nats/token: `0.1%` is ln 1.001, a bare number is nats/token.

    Raises:
        ValueError: If it is neither, or not above 0.
    """
    text = budget.strip()
    try:
        value = math.log1p(float(text[:-1]) / 100.0) if text.endswith("%") else float(text)
    except ValueError as error:
        raise ValueError(
            f"budget is {budget!r}, expected a rise of the perplexity such as 0.1% or a loss in nats/token such as 1e-3"
        ) from error
    if not 0.0 < value < 1.0:
        raise ValueError(f"budget is {budget!r}, expected more than 0 and less than 1 nat/token")
    return value


def share(text: str | None, argument: str) -> float | None:
    """Returns a share: `99%` is 0.99, and so is `0.99`; `None` where nothing is asked for.

    Raises:
        ValueError: If it is no share below 1.
    """
    if text is None:
        return None
    try:
        value = float(text.strip().removesuffix("%")) / (100.0 if text.strip().endswith("%") else 1.0)
    except ValueError as error:
        raise ValueError(f"{argument} is {text!r}, expected a share such as 99% or 0.99") from error
    if not 0.0 <= value < 1.0:
        raise ValueError(
            f"{argument} is {text!r}, expected a share of at least 0 and below 1, such as 99% or 0.99"
        )
    return value


def tokens(lengths: str) -> tuple[int, ...]:
    """Returns length bins: `4096,8192`, or `4k,8k` for the same.

    Raises:
        ValueError: If a part is no number of tokens.
    """
    found = []
    for part in lengths.split(","):
        text = part.strip().lower()
        number = text.removesuffix("k")
        if not number.isdecimal():
            raise ValueError(
                f"lengths is {lengths!r}, expected numbers of tokens by commas, such as 4096,8192 or 4k,8k"
            )
        found.append(int(number) * (1024 if text != number else 1))
    return tuple(found)


def times(text: str | None, argument: str) -> float | None:
    """Returns a share of something: `0.4x`.

    Raises:
        ValueError: If it is no number.
    """
    if text is None:
        return None
    try:
        return float(text.strip().removesuffix("x"))
    except ValueError:
        raise ValueError(f"{argument} is {text!r}, expected a share such as 0.4x") from None


def kinds(families: str) -> tuple[str, ...]:
    """Returns kinds of choices: `window,bf16`.

    Raises:
        ValueError: If one is unknown, or there is none.
    """
    found = tuple(part.strip() for part in families.split(",") if part.strip())
    if not found:
        raise ValueError(f"families is {families!r}, expected some of {','.join(known_families())}")
    refuse_unknown(found)
    return found


def writable(directory: Path, argument: str) -> None:
    """Makes a directory, unless it is there, and refuses one that nothing can be written to.

    Raises:
        ValueError: If it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{argument}: {directory} cannot be made ({error.strerror}); give a directory that can be written"
        ) from error
    try:
        # permissions do not say it all: nobody can make a file in /proc, on a full disk or on one mounted for reading
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{argument}: {directory} cannot be written to ({error.strerror}); give a directory that can"
        ) from error


def known_prices(path: Path | None) -> PriceTable | None:
    """Returns the price table of a file, `None` without one.

    Raises:
        ValueError: If there is no such file, or it is no price table.
    """
    if path is None:
        return None
    if not path.is_file():
        raise ValueError(
            f"prices: {path} is no file; expected the adaattn_prices.json that an earlier calibration wrote"
        )
    return PriceTable.from_json(path.read_text(encoding="utf-8"))


def use_threads(threads: int | None) -> None:
    """Gives torch so many threads; `None` leaves it as it is.

    Raises:
        ValueError: If it is less than 1.
    """
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    torch.set_num_threads(threads)
