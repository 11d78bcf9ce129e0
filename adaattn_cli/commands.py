"""Every command by name: its help and its options; `run` of the module of the same name does what it says."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from .options import DEMO_DIRECTORY, FAMILIES, PLAN_DIRECTORY, Command, Option, Options, argument, share, tokens, words

A_PLAN = "A plan (file, directory or id of the Hub), or the directory of a model that carries one."
TEXT = "Text in UTF-8: .txt, .md, .jsonl with a field text, or directories of them"
AIMS = ("prompt", "step", "memory")
CACHES = ("model", "int8", "k8v4")
DTYPES = ("float32", "bfloat16", "float16", "auto", "fp32", "bf16", "fp16")
OBJECTIVES = ("auto", "causal", "masked")
PADDINGS = ("none", "right", "left")
RECIPES = ("rolling", "strided")

JSON = dict(as_json=Option(bool, False, "Print JSON; everything else goes to stderr.", "--json"))
THREADS = dict(threads=Option(int, None, "CPU threads for torch."), **JSON)
SOURCE = dict(
    device=Option(str, None, "cpu, cuda, cuda:1, or auto: layers on all GPUs. Default: cuda if there is one."),
    revision=Option(str, None, "Revision of a hub model."),
    gguf_file=Option(str, None, "GGUF file within MODEL."),
    trust_remote_code=Option(bool, False, "Allow code from the model's repository."),
)  # fmt: skip
"""Which checkpoint is read, and where it runs."""
LOADING = dict(
    dtype=Option(str, None, "Dtype of the weights; auto: the checkpoint's. Default: the plan's, else float32.",
        choices=DTYPES),
    tokenizer=Option(str, None, "Tokenizer, where it is not the model's own."),
    objective=Option(str, "auto", "How the model is read; auto: as its configuration says.", choices=OBJECTIVES),
    **SOURCE,
)  # fmt: skip
"""How a checkpoint is loaded."""
JUDGED = dict(
    seed=Option(int, 0, "Seed of every random choice: the text sample, the labels, the rows and the needles."),
    sequences=Option(int, 4, "Sequences per length on which calibration measures risks."),
    joint=Option(int, 3, "Sequences per length on which calibration measures whole plans, to scale risks."),
    held_out=Option(int, 24, "Held-out sequences per length, fewer where the text holds fewer."),
    top1=Option(str, None, "Least agreement on the likeliest token (99%). Default: the budget's.", read=share),
    max_kl=Option(float, None, "Largest mean KL, nats/token (1e-3). At most, and by default: the budget."),
    needles_lost=Option(str, None, "Share of the needles that may be lost (2%). Default: 2% beyond chance.",
        "--needles", read=share),
    mask_share=Option(float, 0.15, "Share of the tokens that a masked LM is asked for at a time."),
    maskings=Option(int, 4, "Times that each sequence is masked anew, for a masked LM."),
)  # fmt: skip
"""By which text and limits a plan is judged, and how a masked-language model is read."""


def _check_eval(options: Options) -> None:
    if options.resume and options.output_dir is None:
        raise ValueError("resume: got no --output-dir, expected the directory of the interrupted run")
    if options.max_ppl_ratio is not None and not 0 < options.max_ppl_ratio < float("inf"):
        raise ValueError(f"max_ppl_ratio: got {options.max_ppl_ratio}, expected a ratio such as 1.001")


EVAL = Command(
    """Compare an attention implementation with stock attention on real text.

    Without MODEL it measures the three small models that come with the package, on their held-out text, offline. Both
    implementations read the same tokens in the same batches. The report has perplexity, its difference with a
    confidence interval over documents, how far predictions agree, speed and memory. Under `accelerate launch` or
    `torchrun` the processes share the batches.

    Exit codes: 0 done; 1 measured, but the bound of --max-ppl-ratio is broken; 2 wrong arguments; 3 no data; 4 no such
    model, tokenizer, output head or attention; 5 --output-dir belongs to another run; 6 out of memory; 130 interrupted
    (143 by SIGTERM). After 6, 130 and 143 finished work is kept, and --resume continues it.
    """,
    {
        "Basic": ("data", "plan", "attn_implementation", "baseline", "dtype", "device", "batch_size", "output_dir"),
        "Verification": ("max_ppl_ratio", "baseline_plan", "anchor"),
    },
    _check_eval,
    model=argument(str, None, "Hub id or directory of a causal or masked LM."),
    data=Option(list[str], (), "wikitext, lambada (through datasets), wikitext:PATH, lambada:PATH, or a text or jsonl "
        "file or a directory of them. May be given several times. Default: wikitext."),
    split=Option(str, "test", "Split of a dataset."),
    attn_implementation=Option(str, "adaattn", "Attention implementation under test."),
    baseline=Option(str, "",
        "Stock implementation to replace. Default: sdpa; with --baseline-plan the one under test."),
    plan=Option(str, None, "File, directory or hub id of the plan to run; none: without that of MODEL."),
    baseline_plan=Option(str, None, "Compare with this plan (none: with our exact attention), token by token."),
    cache=Option(str, None, "Read windows in pieces over a cache, as decoding does, that stores the model's numbers or "
        "codes; the other arms read over Transformers' own.", choices=CACHES),
    cache_piece=Option(int, 64, "Tokens of such a piece."),
    streaming=Option(bool, False, "Heads with a window in the plan keep it alone in that cache."),
    anchor=Option(str, None, "Second stock implementation (eager, say): how much two exact ones differ."),
    windows=Option(str, "rolling", "rolling (that of lm-eval) or strided (Transformers' documentation). Masked LMs "
        "have a recipe of their own.", choices=RECIPES),
    context=Option(int, None, "Tokens of a window. Default: the model's maximum."),
    stride=Option(int, None, "Tokens between windows. Default: the context."),
    batch_size=Option(int, 1, "Windows per forward pass; does not change perplexity."),
    padding=Option(str, "none", "none: batches of equal lengths. right, left: padded and masked.", choices=PADDINGS),
    limit_docs=Option(int, None, "Only the first N documents."),
    limit_tokens=Option(int, None, "Only the first N tokens of the text."),
    mask_fraction=Option(float, 1.0, "Masked LMs: share of the tokens that is scored."),
    seed=Option(int, 0, "Seed of that sample."),
    prefix_token=Option(int, None, "Token before each document. Default: BOS, else EOS."),
    max_ppl_ratio=Option(float, None, "Fail (exit 1) if the one-sided 95 % bound of perplexity over stock's is above "
        "(1.001, say)."),
    output_dir=Option(Path, None, "Directory for journals and reports. Default: a new one under results/eval."),
    resume=Option(bool, False, "Go on with the interrupted run in --output-dir."),
    quiet=Option(bool, False, "No progress bar and no table."),
    verbose=Option(bool, False, "Print every row of the report."),
    **LOADING,
    **THREADS,
)  # fmt: skip


def _check_profile(options: Options) -> None:
    if options.against is not None and not options.maps:
        raise ValueError("against: got a plan and no map, expected --map layer.head of the head to look at")
    options.heads = ()
    for text in options.maps:
        layer, _, head = text.partition(".")
        if not (layer.isdecimal() and head.isdecimal() and len(text) < 20):
            raise ValueError(f"map: got {text!r:.80}, expected layer.head such as 3.7")
        options.heads += ((int(layer), int(head)),)


PROFILE = Command(
    """Measure what each head attends to: entropy, sinks, distances, block density, score ranks, rounding.

    It samples rows and makes no attention matrix, so 8k tokens and more fit. The page in --output-dir works offline.

    Exit codes: 0 done; 2 wrong arguments; 3 data unavailable; 4 model unavailable.
    """,
    {"Basic": ("data", "length", "plan", "maps", "output_dir", "dtype", "device")},
    _check_profile,
    model=argument(str, None, "Hub id or directory. Default: the small LLaMA-class model of the package."),
    data=Option(list[str], (), "Text, as for `adaattn eval`. Default: wikitext, or the packaged model's text."),
    length=Option(int, None, "Tokens per sequence. Default: 2048, or the model's maximum.", least=2),
    sequences=Option(int, 2, "Number of sequences.", least=1),
    decode=Option(int, 8, "Tokens to generate after the first sequence.", least=0),
    rows=Option(int, 64, "Query rows sampled per call.", least=1),
    seed=Option(int, 0, "Seed of that sample."),
    maps=Option(list[str], (), "Draw the attention map of this layer.head. May be repeated.", "--map"),
    plan=Option(str, None, "File, directory or hub id of a plan to run; none runs without one."),
    against=Option(str, None, "Beside each --map, draw the error of this plan: exact weights minus its own."),
    output_dir=Option(Path, None, "Directory for profile.json and atlas.html. Default: only the table."),
    **LOADING,
    **THREADS,
)  # fmt: skip

EXPLAIN = Command(
    """Print which attention backend runs in each layer, and why the others do not.

    Exit codes: 0 done; 2 wrong arguments; 4 model unavailable, or the named backend refuses it.
    """,
    model=argument(str, ..., "Hub id or directory; only its configuration is read."),
    attn_implementation=Option(str, "adaattn", "Attention implementation."),
    dtype=Option(str, None, "Explain for this dtype; auto takes the config's. Default: the plan's, else auto.",
        choices=DTYPES),
    cache=Option(str, "model", "Explain for a cache of the model's dtype, or of quantised codes.", choices=CACHES),
    streaming=Option(bool, False, "Count the bytes of a cache that keeps only the plan's windows."),
    plan=Option(str, None, "File, directory or hub id of a plan. Default: the one that MODEL carries."),
    verbose=Option(bool, False, "Print every reason of every backend, also those for other devices."),
    **SOURCE
    | {"device": Option(str, None, "Explain for cpu or cuda, present or not. Default: cuda if there is one.")},
    **JSON,
)  # fmt: skip

CALIBRATE = Command(
    """Make a plan for a loss budget, verify it on held-out text, and save it.

    Without MODEL it uses a small LLaMA and the pages that come with the package: offline, about a minute. For yours:
    `adaattn calibrate MODEL --data books/ --verify-data news.txt --budget 0.1%`. Under `accelerate launch` or
    `torchrun` the processes share the work and make one plan.

    Exit codes: 0 a plan passed for every budget; 2 wrong arguments; 3 a file cannot be read or written; 4 no plan
    passed for a budget, so it stays exact; 6 out of memory; 130 interrupted (143 by SIGTERM).
    """,
    {
        "Basic": ("data", "budget", "aim", "lengths", "verify_data", "output_dir", "dtype", "device"),
        "Verification": ("held_out", "top1", "max_kl", "needles_lost"),
        "Search": (
            "batch", "kv_bytes", "minutes", "resume", "families", "sequences", "rows", "labels", "joint", "prices",
            "captured",
        ),
    },
    model=argument(str, None, "Hub id or directory of a causal or masked LM. Default: the packaged LLaMA."),
    data=Option(list[Path], (), f"{TEXT}; each source counts equally. Needed for a MODEL of yours."),
    budget=Option(list[str], (), "Allowed rise of perplexity (0.1%) or loss in nats/token (1e-3). Given several times: "
        "one measurement, and a plan for each. Default: 0.1%; 1% for the packaged model."),
    verify_data=Option(list[Path], (), "Held-out text from other sources; the plan must pass on each. Default: other "
        "parts of --data."),
    lengths=Option(str, (), "Lengths in tokens, rising (1k,4k or 4096); tokens beyond the longest are exact. Default: "
        "4096, or what the model and the text can fill.", read=tokens),
    risks=Option(Path, None, "Reuse the risks of this plan (directory or file), made from the same weights and text on "
        "any machine.", "--from"),
    prices=Option(Path, None, "Times of an earlier run (its adaattn_prices.json): the plan is the same byte for byte."),
    dtype=Option(str, "auto", "Dtype of the weights; auto: the checkpoint's.", choices=DTYPES),
    resume=Option(bool, False, "Continue the interrupted run in the plan's directory."),
    verbose=Option(bool, False, "Also print nats, levels and versions."),
    quiet=Option(bool, False, "No progress."),
    output_dir=Option(Path, None, f"Directory for the plan. Default: {PLAN_DIRECTORY} (without MODEL "
        f"{DEMO_DIRECTORY}). MODEL is not changed."),
    in_place=Option(bool, False, "Write the plan into MODEL, a directory, whose config.json then carries it."),
    aim=Option(str, "prompt", "What the plan is for: prompts of --lengths tokens, one decode step behind "
        "--lengths keys, or the smallest cache within the budget; the last two by windows alone.", choices=AIMS),
    kv_bytes=Option(str, None, "With --aim memory: cache at the longest length, as a share of the model's (0.4x).",
        read=share),
    families=Option(str, (), f"Kinds of choices by commas, some of {', '.join(FAMILIES)}. Default: all, on a GPU "
        "without rank.", read=words),
    minutes=Option(float, None, "End after N minutes, with the best plan that is verified by then."),
    rows=Option(int, 256, "Query rows sampled per sequence."),
    labels=Option(int, 2, "Label draws per sequence, one backward pass each."),
    batch=Option(int, 1, "Sequences at once: rows of prompts or of a step, as they are timed.", "--batch-size"),
    captured=Option(bool, False, "Price decode steps as in captured CUDA graphs (a static cache): by the device's time "
        "alone."),
    **SOURCE,
    **JUDGED,
    **THREADS,
)  # fmt: skip

VERIFY = Command(
    """Verify a saved plan again on your text at the level of 95 %, by the same test as in calibration.

    Budget, lengths, choices and cache are the plan's; limits are printed. Of the calibration's own text it reads what
    was held out: give its --seed, --sequences and --joint. It warns of other options, machines or versions.

    Exit codes: 0 the plan passes; 1 it does not; 2 wrong arguments, no plan, or one of another model; 3 a file cannot
    be read; 4 model unavailable; 6 out of memory.
    """,
    {"Basic": ("data", "plan", "device"), "Verification": ("held_out", "top1", "max_kl", "needles_lost")},
    model=argument(str, ..., "Hub id or directory of the model that the plan was made for."),
    data=Option(list[Path], (), f"{TEXT}; the plan must pass on each. Needed."),
    plan=Option(Path, None, "File, directory or hub id of the plan. Default: the one that MODEL carries, or "
        f"{PLAN_DIRECTORY}."),
    quiet=Option(bool, False, "No progress."),
    **SOURCE,
    **JUDGED,
    **THREADS,
)  # fmt: skip

SHOW = Command(
    """Show a plan as a picture of layers by heads, with its loss and speed.

    Exit codes: 0 done; 2 wrong arguments, or no plan.
    """,
    path=argument(Path, None, f"{A_PLAN} Default: {PLAN_DIRECTORY}."),
    html=Option(Path, None, "Also write an HTML page."),
    verbose=Option(bool, False, "Also print nats, levels and versions."),
    **JSON,
)  # fmt: skip

EXPLORE = Command(
    """Write a page with a slider over budgets, from exact to the fastest plan.

    It shows the plan that the solver would choose for each budget. Losses are predicted from the risks that calibration
    measured; what was verified on held-out text is marked. The page works offline.

    Exit codes: 0 done; 2 wrong arguments, no plan, or no report next to it.
    """,
    path=argument(Path, None, f"{A_PLAN} Default: {PLAN_DIRECTORY}."),
    html=Option(Path, ..., "HTML page to write."),
    name=Option(str, None, "Name of the model in the heading. Default: the plan's."),
    **JSON,
)  # fmt: skip


def _check_bench(options: Options) -> None:
    options.names = [name for name in options.baseline.split(",") if name]
    options.file = options.output or Path("results", "bench", f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
    options.page = options.table or options.file.with_suffix(".md")
    if options.page == options.file:
        better = options.page.with_suffix(".json")
        raise ValueError(f"output: got {options.page}, where the Markdown goes; expected a name such as {better}")
    if options.output is None and options.table is not None:
        raise ValueError(f"table: got {options.table} and no --output, expected the JSON that it is made of beside it")


BENCH = Command(
    """Measure the speed of attention and of whole models against stock attention.

    All implementations take turns at the same work on the same numbers, in one process. Ratios are taken per round.

    Exit codes: 0 done; 1 --gate and a cell below its floor; 2 wrong arguments; 3 a file cannot be written; 130
    interrupted (143 by SIGTERM), with finished cells in the file.
    """,
    {"Basic": ("only", "attn_implementation", "baseline", "device", "threads", "rounds", "output")},
    _check_bench,
    only=Option(str, "", "Regular expression: time only cells with a matching title."),
    rounds=Option(int, 7, "Samples per implementation and cell; two of what takes over ten times as long.", least=1),
    device=Option(str, "cpu", "cpu, cuda, cuda:1."),
    baseline=Option(str, "", "Names to compare with, comma-separated: stock ones, or sdpa:KERNEL (flash, efficient, "
        "cudnn, math). Default: all stock ones of the grid."),
    attn_implementation=Option(str, "adaattn", "The implementation that is timed, such as adaattn or adaattn_sdpa."),
    output=Option(Path, None, "JSON file to write, with a `.md` next to it. Cells in it that this machine and these "
        "versions measured are kept. Default: a new one under results/bench."),
    table=Option(Path, None, "Write the Markdown to this file instead, e.g. BENCHMARKS.md."),
    gate=Option(bool, False, "Exit with 1 if a cell is below its floor, twice.", "--gate/--no-gate"),
    memory=Option(bool, True, "Measure peak memory, too."),
    profile=Option(Path, None, "Directory for torch.profiler's traces, and tables of what took longest."),
    grid=Option(Path, None, "File with another grid of cells. Default: the package's grid for the device."),
    rivals=Option(Path, None, "Python of an environment with ONNX Runtime, OpenVINO or llama.cpp, in which the grid "
        "beside them is timed."),
    **THREADS,
)  # fmt: skip

DOCTOR = Command(
    """Show versions, CPU, GPU and backends; what is missing, and how to install it.

    Exit codes: 0 AdaAttn can run here; 1 something that it needs is missing.
    """,
    **JSON,
)

RUN = Command(
    """Run a Python program in which `adaattn` is a registered attention implementation.

    Examples: `adaattn run train.py …`, `adaattn run -m trl.scripts.sft --attn_implementation adaattn …`. The program
    runs in this process. If it starts others, wrap each: `accelerate launch --no_python adaattn run train.py …`.

    Exit codes: those of the program; 2 if there is no such program.
    """,
    command=argument(list[str], ..., "FILE.py, -m MODULE, or an installed Python program; then its arguments."),
    plan=Option(Path, None, "Plan (directory or hub id) for models that carry none; other types refuse it."),
    attention=Option(str, None, "Attention for models that the program loads without naming one: adaattn."),
)

COMMANDS: Mapping[str, Command] = {
    "eval": EVAL, "profile": PROFILE, "explain": EXPLAIN, "calibrate": CALIBRATE, "verify": VERIFY,
    "plan show": SHOW, "plan explore": EXPLORE, "bench": BENCH, "doctor": DOCTOR, "run": RUN,
}  # fmt: skip
"""What is typed, to its options. `adaattn_cli.eval.run` does `eval`, `adaattn_cli.plan.show` does `plan show`."""
GROUPS: Mapping[str, str] = {"plan": "Show a plan, or explore other budgets."}
"""First word of several commands, and the help of all of them."""
