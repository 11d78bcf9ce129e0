"""`adaattn doctor`: what is installed on this machine, what is missing, and how to install it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adaattn_hf.backends.capability import capability, of_level
from adaattn_hf.backends.native.build import compiler
from adaattn_hf.backends.native.library import level_names, library, missing
from adaattn_hf.backends.select import BACKENDS
from adaattn_hf.errors import UsageError

from .commands import Doctor
from .options import Done

PACKAGES = {
    "datasets": "hub datasets in `adaattn eval`",
    "evaluate": "the metric",
    "lm_eval": "lm-evaluation-harness",
    "gguf": "GGUF files",
    "accelerate": "Trainer, GGUF files, device maps",
    "peft": "LoRA",
    "matplotlib": "figures of what `adaattn_hf.record` saw",
    "sentence_transformers": "embeddings",
    "trl": "SFT and preference training",
}
"""Optional package -> what it is for."""


class Finding(NamedTuple):
    """What was checked, what was found (empty: it is missing), how to get it, and what the summary says of it."""

    about: str
    name: str
    state: str
    remedy: str = ""
    brief: str = ""


def run(options: Doctor) -> Done:
    """Looks, and prints or returns the findings; code 1 if something required is missing."""
    findings = [*versions(), *machine(), *backends(), *packages()]
    if not options.as_json:
        Console().print(table(findings, verbose=options.verbose))
    lacking = any(finding.about == "versions" and finding.remedy for finding in findings)
    return Done([finding._asdict() for finding in findings], int(lacking))


def table(findings: list[Finding], *, verbose: bool) -> Table:
    """A line per subject and the remedy of each part that is not optional; verbose: a line per finding."""
    drawn = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for about, group in itertools.groupby(findings, lambda finding: finding.about):
        lines = list(group)
        if verbose:
            drawn.add_row(f"[bold]{about}[/]")
            for line in lines:
                remedy = f"[yellow]missing:[/] {escape(line.remedy)}" if line.remedy else ""
                drawn.add_row(escape(line.name), "; ".join(filter(None, (escape(line.state), remedy))))
            continue
        drawn.add_row(about, escape(", ".join(line.brief for line in lines if line.brief)) or "none")
        if about in ("backends", "packages") and (absent := [line.name for line in lines if not line.brief]):
            drawn.add_row("", escape(f"not here: {', '.join(absent)} (--verbose says why)"))
    for finding in findings if not verbose else ():
        if finding.remedy and finding.about != "packages":
            drawn.add_row("[yellow]missing[/]", escape(f"{finding.name}: {finding.remedy}"))
    return drawn


def versions() -> Iterator[Finding]:
    """This package, Python and required packages, compared with the bounds in the metadata."""
    version = importlib.metadata.version("adaattn-hf")
    yield Finding("versions", "adaattn-hf", version, brief=f"adaattn-hf {version}")
    python = platform.python_version()
    yield Finding("versions", "Python", f"{python} ({sys.executable})", brief=f"Python {python}")
    for line in importlib.metadata.requires("adaattn-hf") or ():
        requirement = Requirement(line)
        if requirement.marker is not None:
            continue  # of an extra
        version = installed(requirement.name)
        fits = bool(version) and requirement.specifier.contains(version, prereleases=True)
        brief = f"{requirement.name} {version}" if fits and requirement.name in ("torch", "transformers") else ""
        yield Finding("versions", requirement.name, version, "" if fits else f"pip install '{requirement}'", brief)


def installed(name: str) -> str:
    """Version of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> Iterator[Finding]:
    """The CPU, its threads, the compiler and the native kernels; the GPUs that torch sees."""
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield Finding("cpu", "system", system, brief=system)
    yield Finding("cpu", "instruction set", f"torch sees {torch.backends.cpu.get_cpu_capability()}")
    yield Finding("cpu", "threads", f"{torch.get_num_threads()} (torch.set_num_threads, OMP_NUM_THREADS)")
    found = " ".join(compiler() or ())
    yield Finding("cpu", "C++ compiler", found, "" if found else "apt install g++, or conda install cxx-compiler")
    try:
        kernels, remedy = library(), "python -m adaattn_hf.backends.native"
        lacking = "" if kernels else "; ".join(missing())
    except UsageError as error:
        kernels, remedy, lacking = None, "", str(error)
    if kernels is None:
        yield Finding("cpu", "native kernels", lacking, remedy)
    else:
        level = f"{kernels.level_name} of {', '.join(level_names())}"
        state = f"{level} ({of_level(kernels.level_name).words()}); {kernels.threads or 'all threads of torch'}"
        yield Finding("cpu", "native kernels", state, brief=f"native kernels {level}")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        state = f"torch {torch.__version__} is built {f'for CUDA or ROCm {built}' if built else 'without CUDA'}"
        yield Finding("gpu", "none", state, brief=f"none: {state}")
    for index in range(torch.cuda.device_count()):
        facts: Any = torch.cuda.get_device_properties(index)
        can = capability(torch.device("cuda", index))
        state = (
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute capability {facts.major}.{facts.minor}: "
            f"{can.words() if can else 'ROCm'}"
        )
        yield Finding("gpu", f"cuda:{index}", state, brief=f"cuda:{index}: {state}")


def backends() -> Iterator[Finding]:
    """Every backend, with what is missing for it here."""
    for name, backend in BACKENDS.items():
        try:
            lacking = backend.missing()
        except UsageError as error:
            lacking = (str(error),)
        if backend.supports.device == "cuda" and not torch.cuda.is_available():
            lacking = ("CUDA only, no GPU here", *lacking)
        state = f"not here: {'; '.join(lacking)}" if lacking else "installed"
        yield Finding("backends", name, state, brief="" if lacking else name)


def packages() -> Iterator[Finding]:
    """Optional packages."""
    for module, use in PACKAGES.items():
        name = module.replace("_", "-")
        if importlib.util.find_spec(module) is not None:
            yield Finding("packages", name, f"{installed(name)}, {use}", brief=name)
        else:
            yield Finding("packages", name, use, f"pip install {name}")
