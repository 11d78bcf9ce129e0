"""What `adaattn calibrate` and `adaattn bench` are asked for: texts, files, and what is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from adaattn_hf.eval.settings import Source

from ..errors import UsageError
from .options import tokens


@dataclass(frozen=True)
class Asked(Source):
    """A calibration as a user asks for it.

    Attributes:
        data: Text in UTF-8: .txt, .md, .jsonl with a field text, or directories of them; several sources count alike.
            Default, for the packaged model: the packaged pages.
        budget: Rise of the perplexity (0.1%) or nats/token (1e-3). Default: the preset's, or 0.1%; 1% for the packaged
            model.
        preset: A preset whose budget is taken: balanced, fast, long_context.
        verify_data: Held-out text of other sources, each of them proved. Default: other parts of --data.
        lengths: Length bins in tokens, rising (4096 or 4k); longer sequences are exact. Default: 4096, or what the
            model and the text can fill.
        prices: Prices measured before: the plan is then the same byte for byte.
        dtype: float32, bfloat16, float16 or auto (the checkpoint's).
        device: cpu, cuda, cuda:1. Default: cuda where there is one.
        resume: Go on with the interrupted run in the plan's directory.
        verbose: Print nats, levels and versions, too.
        quiet: No progress.
    """

    data: tuple[Path, ...] = ()
    budget: str | None = None
    preset: str | None = None
    verify_data: tuple[Path, ...] = ()
    lengths: tuple[int, ...] = field(default=(), metadata={"read": tokens})
    prices: Path | None = None
    dtype: str = "auto"
    device: str | None = None
    resume: bool = False
    verbose: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Bench:
    """What is timed, and how.

    Attributes:
        only: Regular expression; cells whose title it matches.
        rounds: Samples per implementation and cell.
        threads: Threads of torch; 0 leaves them as they are.
        device: cpu, cuda, cuda:1.
        implementations: Names, comma-separated: stock ones, sdpa:KERNEL (flash, efficient, cudnn, math). By default all
            stock ones of the grid.
        ours: Our name: adaattn, adaattn_sdpa, say.
        output: JSON to write, a `.md` beside it; cells that it holds stay where this machine and these versions
            measured them.
        overwrite: Begin again where others measured the cells of --output.
        table: Where the Markdown goes instead, e.g. BENCHMARKS.md.
        gate: Exit with 1 if a cell is below its floor, twice.
        memory: Measure peak memory, too.
        profile: Directory for a torch.profiler trace of each cell and implementation.
        grid: Another grid than the one of the package.
    """

    only: str = ""
    rounds: int = field(default=7, metadata={"least": 1})
    threads: int = field(default=0, metadata={"least": 0})
    device: str = "cpu"
    implementations: str = ""
    ours: str = "adaattn"
    output: Path | None = None
    overwrite: bool = False
    table: Path | None = None
    gate: bool = field(default=False, metadata={"option": "--gate/--no-gate"})
    memory: bool = True
    profile: Path | None = None
    grid: Path | None = None

    @property
    def named(self) -> list[str]:
        """Names of `implementations`."""
        return [name for name in self.implementations.split(",") if name]

    def page(self, output: Path) -> Path:
        """Where the Markdown of a JSON file goes.

        Raises:
            UsageError: To the same file as the JSON.
        """
        page = self.table or output.with_suffix(".md")
        if page == output:
            better = output.with_suffix(".json")
            raise UsageError(
                f"output: got {output}, where the Markdown goes; expected a name such as {better}"
            )
        return page
