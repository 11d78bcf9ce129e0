"""`adaattn doctor`: what is installed on this machine, what is missing, and how to get it."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adaattn_hf.backends.capability import capability
from adaattn_hf.backends.native.build import compiler
from adaattn_hf.backends.native.library import level_names, library, missing
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.errors import UsageError
from adaattn_hf.eval.provenance import version_of
from adaattn_hf.stats.stopwatch import ROUNDS, in_turn

from .options import Done, Options

HERE = "here"
SHOWN = ("torch", "transformers")
"""Required packages that are named where they fit, too."""
WORTH = 1.2
"""Gain of linear layers from which a model is worth another dtype."""


class Finding(NamedTuple):
    """What was looked for, its version or why it does not run, and where it is needed how to get it."""

    about: str
    name: str
    state: str
    remedy: str = ""


def run(options: Options) -> Done:
    """Looks, and prints or returns the findings; code 1 if something required is missing."""
    lines = [*findings()]
    if not options.as_json:
        Console().print(table(lines))
    lacking = any(finding.about == "versions" and finding.remedy for finding in lines)
    return Done([finding._asdict() for finding in lines], int(lacking))


def table(findings: list[Finding]) -> Table:
    """A line of what is here for each subject, why the other backends are not, and what to do."""
    present, absent = dict[str, list[str]](), dict[str, list[str]]()
    lacking = []
    for about, name, state, remedy in findings:
        if remedy:
            lacking.append(f"{name}: {'; '.join(filter(None, (state, remedy)))}")
        elif about != "backends":
            present.setdefault(about, []).append(f"{name} {state}")
        else:
            (present.setdefault(about, []) if state == HERE else absent.setdefault(state, [])).append(name)
    drawn = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for about, words in present.items():
        drawn.add_row(about, escape(", ".join(words)))
    for why, names in absent.items():
        drawn.add_row("", escape(f"{', '.join(names)}: {why}"))
    for line in lacking:
        drawn.add_row("[yellow]missing[/]", escape(line))
    return drawn


def bfloat16() -> str:
    """Whether this CPU runs a linear layer, BERT's widest for 256 tokens, faster in bfloat16 than in float32.

    It is timed, as instructions say too little: where AVX-512 BF16 is there without AMX, some CPUs gain nothing by it.
    """
    layers, cpu = {}, torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        tokens, weight = (torch.ones(rows, 768, dtype=dtype, device=cpu) for rows in (256, 3072))
        layers[dtype] = partial(torch.nn.functional.linear, tokens, weight)
    times = in_turn(layers, cpu, ROUNDS).values()
    full, half = (statistics.median(one.wall for one in runs) for runs in times)
    if full < WORTH * half:
        return "no faster in linear layers: load encoders in float32"
    return f"{full / half:.1f} times as fast as float32 in linear layers: load encoders in it"


def findings() -> Iterator[Finding]:
    """This package, Python and what is required, by the bounds in the metadata; CPU and kernels, GPUs, backends."""
    own = version_of("adaattn-hf")
    yield Finding("versions", "adaattn-hf", own, "" if own else "pip install the checkout")
    yield Finding("versions", "Python", platform.python_version())
    for requirement in map(Requirement, (own and importlib.metadata.requires("adaattn-hf")) or ()):
        if requirement.marker is not None:
            continue  # of an extra
        version = version_of(requirement.name)
        if not version or not requirement.specifier.contains(version, prereleases=True):
            yield Finding("versions", requirement.name, version, f"pip install '{requirement}'")
        elif requirement.name in SHOWN:
            yield Finding("versions", requirement.name, version)
    yield Finding("cpu", platform.system(), f"{platform.machine()}, {os.cpu_count()} cores")
    try:
        if kernels := library():
            yield Finding("cpu", "native kernels", f"for {kernels.level_name} (built for {', '.join(level_names())})")
        else:
            first = "" if compiler() else "apt install g++, or conda install cxx-compiler; then "
            build = f"{first}python -m adaattn_hf.backends.native"
            yield Finding("cpu", "native kernels", "; ".join(missing()), build)
    except UsageError as error:
        yield Finding("cpu", "native kernels", str(error))
    yield Finding("cpu", "bfloat16", bfloat16())
    if not (cuda := torch.cuda.is_available()):
        built = torch.version.cuda or torch.version.hip
        state = f"torch {torch.__version__} is built {f'for CUDA or ROCm {built}' if built else 'without CUDA'}"
        yield Finding("gpu", "none:", state)
    for index in range(torch.cuda.device_count()):
        facts: Any = torch.cuda.get_device_properties(index)
        can = capability(torch.device("cuda", index))
        size = f"{facts.total_memory / 2**30:.0f} GiB, compute capability {facts.major}.{facts.minor}"
        yield Finding("gpu", f"cuda:{index}", f"{facts.name}, {size}: {can.words() if can else 'ROCm'}")
    for name, backend in BACKENDS.items():
        try:
            lacking = backend.missing()
        except UsageError as error:
            lacking = (str(error),)
        if backend.supports.device == "cuda" and not cuda:
            lacking = ("CUDA only, no GPU here",)
        yield Finding("backends", name, "; ".join(lacking) or HERE)
