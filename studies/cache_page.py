"""The page of the study of caches, written from what it measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from .cache_arms import ARMS, READ
from .cache_speed import MARGIN, beyond
from .cache_text import CONFIDENCE, HAYSTACKS, PARTS, PIECE, STOCK, texts
from .pages import commit


def page(found: dict[str, Any]) -> str:
    """The results as a page: what the caches cost, then how fast they are; each section is of a run of its own."""
    lines = ["# Caches beside one another", "", "Written by `python -m studies.cache`; do not edit.", ""]
    if "loss" in found:
        lines += [*_loss(found["loss"]), *_others(found["loss"])]
    if "speed" in found:
        timed, made = found["speed"], found["speed"]["provenance"]
        lines += [
            "## Speed",
            "",
            f"{_where(made)}, commit {made['commit']}. Decode steps "
            f"of whole models behind a filled cache, at most {timed['asked']['rounds']} rounds of "
            f"{timed['asked']['steps']} steps that take the caches "
            f"{'one after another' if made['driver'] else 'in turn'}; "
            f"times are ratios to {STOCK} under sdpa in the same round (median, quartiles), by the clock and by the "
            "process's time. Bytes are those of every storage that the cache holds, divided by the tokens in it; "
            "beside them their ratio to what `explain` foretells with the room for the steps"
            f"{', and that of the most that the steps allocated' if made['driver'] else ''}.",
            "",
        ]
        for model, rows in timed["models"].items():
            lines += _speed(model, rows, timed["floor"].get(model, {}), timed["weights"].get(model), timed["absent"])
        lines += _others(timed)
        for one in timed.get("added", ()):  # caches of other libraries, measured later than the rest
            beside = f"beside {STOCK} in the same rounds: {'; '.join(one['caches'])}"
            lines += [f"Added at commit {one['commit']}, {beside}.", ""]
    return "\n".join(lines[:-1]) + "\n"


def _others(section: Mapping[str, Any]) -> list[str]:
    """What was not measured and why, and the other libraries that were."""
    absent = [f"* {name}: {reason}" for name, reason in section["absent"].items()]
    lines = ["Not measured here:", "", *absent, ""] if absent else []
    return [*lines, *([section["libraries"], ""] if section["libraries"] else [])]


def _speed(
    model: str,
    rows: Sequence[Mapping[str, Any]],
    floor: Mapping[str, float],
    weights: int | None,
    absent: Mapping[str, str],
) -> list[str]:
    """Bytes and times over one model."""

    def held(row: Mapping[str, Any]) -> float:
        return float(row["batch"] * row["length"] * row["bytes_per_token"])

    stocks = {(row["batch"], row["length"]): held(row) for row in rows if row["cache"] == STOCK and "failed" not in row}
    lines = [
        f"### {model}",
        "",
        "| batch | tokens | cache | bytes/token | of `explain` | tokens/s | times as fast | quartiles "
        "| by process time | by bytes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = sorted(rows, key=lambda row: (row["batch"], row["length"]))  # measured in any order
    for row in rows:
        start = f"| {row['batch']} | {row['length']} | {row['cache']} | "
        if "failed" in row:
            lines.append(f"{start}– | – | – | – | {row['failed']} | – | – |")
            continue
        told = row.get("foretold_per_token")
        parts = [row["bytes_per_token"], *([row["peak_per_token"]] if "peak_per_token" in row else [])]
        shares = "–" if told is None else ", ".join(f"{part / told:.3f}" for part in parts)
        wall, process = row.get("wall"), row.get("process")
        ratios = (
            "– | – | –"
            if wall is None or process is None
            else f"{wall['median']:.2f} | {wall['quartile_25']:.2f} to {wall['quartile_75']:.2f} | "
            f"{process['median']:.2f}"
        )
        stock = stocks.get((row["batch"], row["length"]))
        bare = None if stock is None or weights is None else (weights + stock) / (weights + held(row))
        lines.append(
            f"{start}{row['bytes_per_token']:,.0f} | {shares} | {row['tokens_per_second']:.2f} | {ratios} | "
            f"{'–' if bare is None else format(bare, '.2f')} |"
        )
    bounds = []
    for row in rows:
        if row["cache"] == STOCK and str(row["batch"]) in floor and "failed" not in row:
            most = floor[str(row["batch"])] / row["tokens_per_second"]
            part = "" if weights is None else f"; {held(row) / (weights + held(row)):.1%} of the bytes"
            bounds.append(f"{most:.2f} (batch {row['batch']}, {row['length']} tokens{part})")
    wrong = beyond(rows)
    within = f"more than {MARGIN:.0%} from what `explain` foretells"
    return [
        *lines,
        "",
        f"With no cache to read a step would be as many times as fast: {', '.join(bounds)}.",
        "",
        *([] if weights is None else [_bytes(weights), ""]),
        f"Caches of this package {within}: {'; '.join(wrong) or 'none'}.",
        "",
        *_untimed(rows, absent),
    ]


def _untimed(rows: Sequence[Mapping[str, Any]], absent: Mapping[str, str]) -> list[str]:
    """The caches that run here, but were not timed at a length and batch where others were."""
    lines = []
    for batch, length in sorted({(row["batch"], row["length"]) for row in rows}):
        there = {row["cache"] for row in rows if (row["batch"], row["length"]) == (batch, length)}
        missing = [arm.name for arm in ARMS if arm.name not in there | set(absent)]
        if missing:
            lines += [f"Not timed at batch {batch}, {length} tokens: {'; '.join(missing)}.", ""]
    return lines


def _bytes(weights: int) -> str:
    """What the bytes say about times."""
    return (
        f"A step reads {weights:,} bytes of weights whatever its cache. *By bytes* it would be as many times as fast "
        f"if it took as long as it takes to read these and its cache once, with {STOCK} as with the others: a smaller "
        f"cache alone gives no more than that. More is won where {STOCK} takes longer over its keys and values than "
        "reading them does, and that ends where there is no cache to read: the ratios above are the most that any "
        "cache gives, as far as the steps without one, in rounds of their own, ran at the same pace."
    )


def _loss(loss: Mapping[str, Any]) -> list[str]:
    """What the caches cost on text, beside the bytes that they take; the smallest first."""
    rows, held = sorted(loss["rows"], key=lambda row: (loss["held"][row["cache"]], row["upper"])), loss["held"]
    lines, least = [], float("inf")
    for row in rows:
        size, best = held[row["cache"]], row["upper"] < least
        least = min(least, row["upper"])
        share = f"{size / held[STOCK]:.1%}"
        lines.append(
            f"| {row['cache']} | {size:,.0f} | {f'**{share}**' if best else share} | {row['delta_nll']:+.2e} | "
            f"{row['upper']:+.2e} | {row['found']}/{row['needles']} |"
        )
    commits = ", ".join(sorted({commit({"commit": one}) for one in loss["commits"].values()}))
    return [
        "## Loss against memory",
        "",
        f"{_where(loss['provenance'])}, commit {commits}; losses do not depend on how busy it is. {loss['text']}: half "
        "a window is read at once, pressed where an arm presses, the other half behind it in pieces of "
        f"{PIECE} tokens. Δnll against {STOCK} on the same tokens, nats/token, upper bound at {CONFIDENCE:.0%} over "
        f"windows. Needles found in at most {HAYSTACKS} prompts, whose questions come behind them: no press sees what "
        "it will be asked.",
        "",
        "Bytes are those of every storage that the cache holds behind the prompt, divided by the prompt's tokens. "
        "Tokens behind it are never pressed, and QuantizedCache keeps the latest as numbers. Bold: no other cache here "
        "has as small a bound in as few bytes.",
        "",
        f"| cache | bytes/token | of {STOCK}'s | Δnll | at most | needles found |",
        "|---|---|---|---|---|---|",
        *lines,
        "",
        f"Without a loss here: {_unread(loss) or 'none'}.",
        "",
    ]


def _unread(loss: Mapping[str, Any]) -> str:
    """The caches that ran, but have no loss, and how many texts they have read."""
    asked = sum(texts(loss["asked"]["windows"]).values())
    there = {row["cache"] for row in loss["rows"]} | set(loss["absent"])
    done = {arm.name: sum(len(loss["read"].get(part, {}).get(arm.name, ())) for part in PARTS) for arm in READ}
    missing = (f"{name} ({count} of {asked} texts read)" for name, count in done.items() if name not in there)
    return "; ".join(missing)


def _where(made: Mapping[str, Any]) -> str:
    """What measured: a device with its driver, or a processor with its threads."""
    if made["driver"]:
        return f"{made['device']}, {made['driver']}, torch {made['versions']['torch']}"
    return f"{made['cpu']}, {made['threads']} thread{'s' * (made['threads'] != 1)}"
