"""`adaattn doctor`: what is installed on this machine, what is missing, and how to install it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaattn_hf.errors import UsageError

from .json_output import AsJson, print_json

PACKAGES = {
    "datasets": "hub datasets in `adaattn eval`",
    "evaluate": "the metric",
    "lm_eval": "lm-evaluation-harness",
    "gguf": "GGUF files",
    "accelerate": "Trainer, GGUF files, device maps",
    "peft": "LoRA",
    "matplotlib": "`adaattn plan show --png`",
    "sentence_transformers": "embeddings",
    "trl": "SFT and preference training",
}
"""Optional package -> what it is for."""


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        about: `versions`, `cpu`, `gpu`, `backends` or `packages`.
        name: What was checked.
        state: What was found; empty where it is missing.
        remedy: How to get what is missing; empty where nothing is.
    """

    about: str
    name: str
    state: str
    remedy: str = ""


def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", help="Print everything, in tables.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, CPU, GPU, backends and packages; what is missing, and how to install it.

    Exit codes: 0 AdaAttn can run here; 1 something that it needs is missing.
    """
    findings = [*versions(), *processor(), *devices(), *backends(), *packages()]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        (show if verbose else summarise)(findings, Console())
    raise typer.Exit(int(any(finding.about == "versions" and finding.remedy for finding in findings)))


def summarise(findings: list[Finding], console: Console) -> None:
    """Print a line per subject, and the remedy for each missing part that is not optional."""
    from rich.markup import escape

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for about in dict.fromkeys(finding.about for finding in findings):
        own = [finding for finding in findings if finding.about == about]
        here = [finding for finding in own if finding.state and not (finding.remedy or finding.state[:4] == "not ")]
        words = {
            "versions": [f"{finding.name} {finding.state.partition(' (')[0]}" for finding in here[:4]],
            "cpu": [
                f"{finding.name} {finding.state.partition(' (')[0]}"
                for finding in here
                if finding.name in ("system", "native kernels")
            ],
            "gpu": [f"{finding.name}: {finding.state}" for finding in own],
        }.get(about, [finding.name for finding in here])
        table.add_row(about, escape(", ".join(words)) or "none")
        apart = [finding.name for finding in own if finding not in here]
        if apart and about in ("backends", "packages"):
            table.add_row("", escape(f"not here: {', '.join(apart)} (--verbose says why)"))
    for finding in findings:
        if finding.remedy and finding.about != "packages":
            table.add_row("[yellow]missing[/]", escape(f"{finding.name}: {finding.remedy}"))
    console.print(table)


def show(findings: list[Finding], console: Console) -> None:
    """Print one table per subject."""
    from rich.markup import escape

    for about in dict.fromkeys(finding.about for finding in findings):
        table = Table(title=about, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            if finding.about == about:
                missing = f"[yellow]missing:[/] {escape(finding.remedy)}" if finding.remedy else ""
                table.add_row(finding.name, "; ".join(filter(None, (escape(finding.state), missing))))
        console.print(table)
        console.print()


def versions() -> Iterator[Finding]:
    """This package, Python and required packages, compared with the bounds in the metadata."""
    from packaging.requirements import Requirement

    yield Finding("versions", "adaattn-hf", importlib.metadata.version("adaattn-hf"))
    yield Finding("versions", "Python", f"{platform.python_version()} ({sys.executable})")
    for line in importlib.metadata.requires("adaattn-hf") or ():
        requirement = Requirement(line)
        if requirement.marker is not None:
            continue  # of an extra
        version = installed(requirement.name)
        fits = bool(version) and requirement.specifier.contains(version, prereleases=True)
        yield Finding("versions", requirement.name, version, "" if fits else f"pip install '{requirement}'")


def installed(name: str) -> str:
    """Version of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def processor() -> Iterator[Finding]:
    """The CPU, its threads, the compiler and the native kernels."""
    import torch

    from adaattn_hf.backends.capability import of_level
    from adaattn_hf.backends.native.build import compiler
    from adaattn_hf.backends.native.library import level_names, library, missing

    yield Finding("cpu", "system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    yield Finding("cpu", "instruction set", f"torch sees {torch.backends.cpu.get_cpu_capability()}")
    yield Finding("cpu", "threads", f"{torch.get_num_threads()} (torch.set_num_threads, OMP_NUM_THREADS)")
    found = compiler()
    yield Finding(
        "cpu", "C++ compiler", " ".join(found or ()), "" if found else "apt install g++, or conda install cxx-compiler"
    )
    try:
        kernels = library()
    except UsageError as error:
        yield Finding("cpu", "native kernels", str(error))
        return
    if kernels is None:
        yield Finding("cpu", "native kernels", "; ".join(missing()), "python -m adaattn_hf.backends.native")
    else:
        state = (
            f"{kernels.level_name} of {', '.join(level_names())} ({of_level(kernels.level_name).words()}); "
            f"{kernels.threads or 'all threads of torch'}"
        )
        yield Finding("cpu", "native kernels", state)


def devices() -> Iterator[Finding]:
    """The GPUs that torch sees."""
    import torch

    from adaattn_hf.backends.capability import capability

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        made = f"for CUDA or ROCm {built}" if built else "without CUDA"
        yield Finding("gpu", "none", f"torch {torch.__version__} is built {made}")
    for index in range(torch.cuda.device_count()):
        facts: Any = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        can = capability(torch.device("cuda", index))
        yield Finding(
            "gpu",
            f"cuda:{index}",
            f"{facts.name}, {memory}, compute capability {facts.major}.{facts.minor}: {can.words() if can else 'ROCm'}",
        )


def backends() -> Iterator[Finding]:
    """Returns every backend, with what is missing for it here."""
    import torch

    from adaattn_hf.backends.select import BACKENDS

    for name, backend in BACKENDS.items():
        try:
            lacking = backend.missing()
        except UsageError as error:
            lacking = (str(error),)
        if backend.device == "cuda" and not torch.cuda.is_available():
            lacking = ("CUDA only, no GPU here", *lacking)
        yield Finding("backends", name, f"not here: {'; '.join(lacking)}" if lacking else "installed")


def packages() -> Iterator[Finding]:
    """Optional packages."""
    for module, use in PACKAGES.items():
        name = module.replace("_", "-")
        there = importlib.util.find_spec(module) is not None
        yield Finding(
            "packages", name, f"{installed(name)}, {use}" if there else use, "" if there else f"pip install {name}"
        )
