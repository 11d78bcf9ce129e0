"""`adaattn verify`: verifies a saved plan again, on the user's text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaattn_hf.eval.progress import tell
from adaattn_hf.eval.settings import Masking, Source

from ..calibration.settings import Judged
from .fields import with_options
from .interrupt import ending
from .json_output import AsJson, print_json
from .options import Threads, use_threads

PANELS = {"Basic": ("data", "plan", "device"), "Proof": ("most_held_out", "top1", "needles_lost")}


@dataclass(frozen=True)
class Proved(Source):
    """Options: the plan to verify, and the text.

    Attributes:
        data: Text in UTF-8: .txt, .md, .jsonl with a field text, or directories of them; the plan must pass on each.
        plan: File, directory or hub id of the plan. Default: the one that MODEL carries, or adaattn-plan.
        quiet: No progress.
    """

    data: tuple[Path, ...] = ()
    plan: Path | None = None
    quiet: bool = False


@with_options(asked=Proved, judged=Judged, masking=Masking)
def verify(
    model: Annotated[str, typer.Argument(help="Hub id or directory of the model that the plan was made for.")],
    *,
    asked: Proved,
    judged: Judged,
    masking: Masking,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Verify a saved plan again on your text: one look at the level of 95 %, by the same test as in calibration.

    The plan says its budget, lengths, choices and cache. It says no limit: those are the program's, or your options. Of
    the calibration's own text it reads what was held out. It reports which limits were used, and if options, machine,
    torch or transformers differ from those of the calibration. A plan with a cache format is verified over that cache.

    Exit codes: 0 the plan passes; 1 it does not; 2 wrong arguments, no plan, or one of another model; 3 a file cannot
    be read; 4 model unavailable; 6 out of memory.
    """
    from ..plans.plan import PlanError
    from ..plans.wording import allowed, in_nats
    from ..plans.wording import share as in_percent
    from .verify_job import prove

    console = Console(stderr=as_json)
    with ending(argument="data", wrong=(ValueError, FileNotFoundError, PlanError)):
        use_threads(threads)
        found = prove(model, asked, judged, masking, console)
    for words in found["differing"]:
        tell(console, f"warning: {words}; figures may differ from those of the stored verification")
    over = "" if found["cache"] == "model" else f" over a cache in {found['cache']}"
    if not found["verdicts"]:
        tell(console, f"{found['model']}: every layer is exact, and nothing is to be verified")
    for length, verdict in found["verdicts"].items():
        tell(
            console,
            f"{found['model']}, {verdict['tokens']:,} predictions at {length} tokens{over}: {verdict['sentence']}",
        )
    used = found["limits"]
    lost = "2 % beyond chance" if used["needles"] is None else in_percent(used["needles"])
    tell(
        console,
        f"limits: perplexity {allowed(used['budget'])} at a level of {in_percent(used['confidence'])}, mean KL "
        f"{in_nats(used['budget'] + used['rounding'])} nats/token, likeliest token {in_percent(used['top1'], 2)}, "
        f"needles lost {lost}",
    )
    tell(console, f"stored verification: {found['stored_verdict']}")
    if as_json:
        print_json(found)
    if not found["passed"]:
        raise typer.Exit(1)
