"""`adaattn bench`: times adaattn against every stock implementation installed here, over a grid of cells in YAML.

Cells are run in turn; each result is printed, and written to the output file at once.
"""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adaattn_hf._files import json_text, parse_json, write_atomically
from adaattn_hf.backends.select import BackendRefusal
from adaattn_hf.errors import UsageError, unknown
from adaattn_hf.eval.bench.grid import ENGINES, Cell, Grid, read_grid
from adaattn_hf.eval.bench.processes import Process, error_of_processes
from adaattn_hf.eval.bench.report import markdown
from adaattn_hf.eval.bench.ways import KERNELS, error_of, shape_of, trace, ways
from adaattn_hf.eval.bench.work import Work, missing, padding_of
from adaattn_hf.eval.progress import shown_progress, tell
from adaattn_hf.eval.provenance import provenance
from adaattn_hf.eval.timing import measure, peak_bytes, spread
from adaattn_hf.patches.checkpoint import known_implementations, resolve_device
from adaattn_hf.patches.registry import register

from .ending import ending, use_threads, writable
from .options import Done, Options

OURS = "adaattn"
# What an implementation raises that cannot do a cell; anything else is a fault of ours and stops the run.
_REFUSALS = (NotImplementedError, ValueError, RuntimeError, ImportError, OSError)


def run(options: Options) -> Done:
    """Measures, and returns the report; code 1 if a cell is below its floor and that matters."""

    def kept() -> str:
        if options.file.is_file():
            return f"finished cells are kept in {options.file}; --output {options.file} --only REGEX adds others"
        return "no cell was finished"

    with ending(argument="output", default=options.file, kept=kept):
        use_threads(options.threads)
        where = resolve_device(options.device)
        data = read_grid(options.grid, where.type, options.rivals)
        try:
            cells = [cell for cell in data.cells if re.search(options.only, cell.title)]
        except re.error as error:
            raise UsageError(f"--only: got {options.only!r}, which is no regular expression ({error})") from error
        if not cells:
            titles = "\n".join(cell.title for cell in data.cells)
            raise UsageError(f"--only: got {options.only!r}, which matches no cell; known:\n{titles}")
        register(impossible=True)  # cells say what an implementation lacks that is not installed here
        accepted = [*known_implementations(), *KERNELS, *(name for cell in cells for name in cell.arms)]
        for name in (options.attn_implementation, *options.names):
            if name not in accepted:
                raise UsageError(unknown("attention implementation", name, dict.fromkeys(accepted)))
        writable(options.file.parent, "output")
        writable(options.page.parent, "table")
        if options.profile is not None:
            writable(options.profile, "profile")
        report, failed = measured(cells, data, where, options)
    return Done(report, int(options.gate and bool(failed)))


def measured(cells: list[Cell], data: Grid, where: torch.device, options: Options) -> tuple[dict[str, Any], list[str]]:
    """Measures, prints and writes; returns the report, and a line for each cell that is below its floor."""
    console, names, output = Console(stderr=options.as_json), options.names or data.stock, options.file
    absent = {name: why for name in names if (why := missing(name, where)) is not None}
    present = [name for name in names if name not in absent]
    report: dict[str, Any] = {
        "provenance": provenance(where),
        "rounds": options.rounds,
        "ours": options.attn_implementation,
        "absent": absent,
        "slower": data.slower,
        "cells": [],
    }
    # a run of some cells keeps the others' figures, each with the commit that it was measured at
    earlier = _earlier(output, report)
    failed = []
    step = f"{len(cells)} cells"
    with shown_progress(Console(stderr=True)) as progress:
        for number, cell in enumerate(cells):
            progress(step, number, len(cells))
            named = [arm for arm in cell.arms[1:] if arm in options.names or not options.names]
            others = named if cell.arms else [n for n in present if options.names or n not in cell.without]
            figures = run_cell(cell, [options.attn_implementation, *others], data, where, options)
            if figures["best"] is not None and figures["ratio_best"]["wall"]["median"] < cell.floor:
                failed.append(f"{cell.title}: {figures['ratio_best']['wall']['median']:.2f} < {cell.floor:g}")
            earlier[cell.title] = {**figures, "commit": report["provenance"]["commit"]}
            report["cells"] = [
                # dtype and shape are the grid's, and not measured
                {**earlier[one.title], "dtype": one.dtype, "shape": shape_of(one, data)}
                for one in data.cells
                if one.title in earlier
            ]
            tell(console, _line(figures))
            gc.collect()
            # after every cell: an interrupted run keeps what it measured
            write_atomically(output, json_text(report, indent=1) + "\n")
            write_atomically(options.page, markdown(report, output.name))
        progress(step, len(cells), len(cells))
    tell(console, f"written: {output}, {options.page}")
    if options.gate:
        tell(console, *(f"below its floor: {line}" for line in failed))
    return report, failed


def _earlier(output: Path, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if not output.exists():
        return {}
    now, same = report["provenance"], ("versions", "python", "cpu", "cores", "threads", "device")
    try:
        old = parse_json(output.read_text(encoding="utf-8"))
        made, cells = old["provenance"], {cell["title"]: cell for cell in old["cells"]}
        changed = [f"{name} was {made[name]}, is {now[name]}" for name in same if made[name] != now[name]]
        if made.get("instructions", now["instructions"]) != now["instructions"]:  # older reports have none
            changed.append(f"instructions were {made['instructions']}, are {now['instructions']}")
        changed += [f"ours was {old['ours']}, is {report['ours']}"] * (old["ours"] != report["ours"])
        holds = "cells that were measured otherwise"
    except (ValueError, KeyError, TypeError) as error:
        changed, cells = [f"{type(error).__name__}: {error}"], {}
        holds = "no report of `adaattn bench`"
    if changed:
        raise UsageError(f"output: {output} holds {holds} ({'; '.join(changed)}); give another file, or delete it")
    return cells


def run_cell(cell: Cell, names: list[str], grid: Grid, device: torch.device, options: Options) -> dict[str, Any]:
    """All figures of one cell; the first name is ours, the others are compared with it."""
    # a function that torch has compiled for eight kinds of calls is run uncompiled from then on: stock flex_attention
    torch.compiler.reset()
    make = ways(cell, grid, device)  # files of an arm's process are there as long as it is
    works, compared = _worked(cell, names, make, device)
    if options.profile is not None:
        trace(works, options.profile, cell.title, device)
    for _ in range(1 + options.gate):
        # a neighbour on the machine may have disturbed the first time; a real loss shows twice
        times = measure(works, options.rounds, device)
        ratios = {
            name: {
                clock: spread([a / b for a, b in zip(times[name][clock], times[OURS][clock], strict=False)])
                for clock in ("wall", "process")
            }
            for name in works
            if name != OURS
        }
        # what a model may be set to
        stock = [name for name in ratios if name not in KERNELS and not name.startswith((f"{OURS},", *ENGINES))]
        best = min(stock, key=lambda name: ratios[name]["wall"]["median"], default=None)
        if best is None or ratios[best]["wall"]["median"] >= cell.floor:
            break
    processes = {name: work for name, work in works.items() if isinstance(work, Process)}
    peaks = {
        name: processes[name].peak if name in processes else peak_bytes(work, device)[0]
        for name, work in (works.items() if options.memory else ())
    }
    return {
        "title": cell.title,
        "level": cell.level,
        "floor": cell.floor,
        "times": {name: {clock: spread(values) for clock, values in clocks.items()} for name, clocks in times.items()},
        "ratios": ratios,
        "best": best,
        "ratio_best": None if best is None else ratios[best],
        "peak_bytes": peaks,
        **({"runs": {name: process.runs for name, process in processes.items()}} if cell.arms else {}),
        **compared,
    }


def _worked(
    cell: Cell, names: list[str], make: Callable[[str], Any], device: torch.device
) -> tuple[dict[str, Work], dict[str, Any]]:
    """The works of those that can do a cell, done once; how answers differ, their errors, and why others cannot."""
    works: dict[str, Work] = {}
    refused: dict[str, str] = {}
    differences: dict[str, float] = {}
    errors: dict[str, float] = {}
    first_output: Any = None
    error = error_of_processes(make) if cell.arms else error_of(cell, device)
    for name in names:
        try:
            work = make(name)
            result = work()
        except _REFUSALS as unable:
            if isinstance(unable, BackendRefusal) and name == names[0]:
                raise UsageError(
                    f"attn_implementation: got {name!r}, expected what serves {cell.title}: {unable}"
                ) from unable
            if name == names[0]:
                raise
            refused[name] = str(unable).splitlines()[0][:200] if str(unable) else type(unable).__name__
            continue
        label = OURS if name == names[0] else name
        if first_output is None:
            first_output = result.detach()
        else:
            differences[name] = _difference(cell, first_output, result.detach())
        if error is not None:
            errors[label] = error(result)
        works[label] = work
    return works, {"difference": differences, "error": errors, "refused": refused}


def _difference(cell: Cell, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    if cell.padding is not None and ours.ndim > 1 and ours.shape[1] == cell.keys > 1:
        real = padding_of(cell, ours.device)
        ours, theirs = ours[real], theirs[real]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _line(figures: dict[str, Any]) -> str:
    ours = figures["times"][OURS]["wall"]["median"] * 1e3
    times = ", ".join(f"{name} {entry['wall']['median']:.2f}" for name, entry in figures["ratios"].items())
    others = f"; times as fast as {times}" if times else ""
    refused = "".join(f"; {name} refused: {why}" for name, why in figures["refused"].items())
    return f"{figures['title']}: {ours:{'.3g' if ours < 1e3 else ',.0f'}} ms{others}{refused}"
