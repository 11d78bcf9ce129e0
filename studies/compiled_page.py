"""The page of what the Triton kernels take of each device, and the record of one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaattn_hf.backends.capability import Capability, of_sm

from .pages import table

DEVICES = {
    80: "A100, A30", 86: "RTX 30, A10, A40", 89: "RTX 40, L4, L40", 90: "H100, H200", 100: "B200", 120: "RTX 50",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel as one call launches it.

    Attributes:
        sm: Compute capability that it was compiled for, 90 for 9.0.
        call: The call, in words.
        kernel: Name of the kernel.
        tile: Query rows, key columns, warps and stages; of a step, no rows.
        shared: Bytes of shared memory of a program.
        limit: Bytes that the device has for one.
        registers: Of a thread; None where no machine code was made.
        stack: Bytes of memory of a thread, for what registers do not hold; None in the same case.
    """

    sm: int
    call: str
    kernel: str
    tile: str
    shared: int
    limit: int
    registers: int | None = None
    stack: int | None = None


def record(sm: int) -> Capability:
    """What a compute capability can do."""
    return of_sm(divmod(sm, 10))


def page(launches: Sequence[Launch], origin: dict[str, Any], version: str) -> str:
    """The page: for each kernel, tile and device the most that it takes, and what is refused."""
    most: dict[tuple[str, str], dict[int, Launch]] = {}
    for one in launches:
        if one.kernel != "refused":
            row = most.setdefault((one.kernel, one.tile), {})
            row[one.sm] = max((row.get(one.sm, one), one), key=lambda each: (each.shared, each.stack or 0))
    rows = [
        [f"`{kernel}`", tile, *(_cell(row.get(sm)) for sm in DEVICES)]
        for (kernel, tile), row in sorted(most.items())
    ]
    lines = [
        "# What the Triton kernels take of each device",
        "",
        "Made by `make compiled` (`studies/compiled.py`), which compiles what calls launch for devices that need not",
        "be there; every launch lies in `compiled.json`. A cell is the most shared memory that a program takes, in",
        "bytes, of all calls that launch a kernel with this tile (query rows / key columns / warps / stages); in",
        "brackets, where they were counted, the registers of its threads, and bytes of a thread's memory for what",
        "these do not hold. Nothing was run.",
        "",
        f"Triton {version}, torch {origin['versions']['torch']}, commit {origin['commit']}.",
        "",
        *table(
            ["kernel", "tile", *(f"sm_{sm}: {name}" for sm, name in DEVICES.items())],
            [["", "limit", *(f"{record(sm).shared_memory:,}" for sm in DEVICES)], *rows],
        ),
        "## What is refused",
        "",
    ]
    no = [one for one in launches if one.kernel == "refused"]
    lines += [f"- sm_{one.sm}, {one.call}: {one.tile}" for one in no] or ["Nothing."]
    return "\n".join(lines) + "\n"


def _cell(one: Launch | None) -> str:
    if one is None:
        return "–"
    return f"{one.shared:,}" + ("" if one.registers is None else f" ({one.registers}, {one.stack:,})")
