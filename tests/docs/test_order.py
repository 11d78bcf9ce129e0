"""docs/architecture.md shows the order of backends as it is, and the page of each rule has times of its backends."""

from adaattn_hf.backends.order import RULES, Rule

from ..support.source_tree import ROOT


def table() -> str:
    lines = ["| calls | tried in this order | measured |", "|---|---|---|"]
    for rule in RULES:
        page = f"[{rule.page.partition('.')[0]}](results/{rule.page})" if rule.page else ""
        lines.append(f"| {rule.calls} | {', '.join(f'`{name}`' for name in rule.names)} | {page} |")
    return "\n".join(lines)


def test_the_table_of_the_order_is_that_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def untimed(rule: Rule) -> list[str]:
    """Backends of a rule for GPUs that no table of its page has a column of; `eager` takes what is left."""
    page = (ROOT / "docs" / "results" / rule.page.partition("#")[0]).read_text(encoding="utf-8")
    return [name for name in rule.names if name != "eager" and f"| {name} |" not in page]


def test_no_backend_is_in_the_order_on_gpus_that_was_not_timed() -> None:
    rules = [rule for rule in RULES if rule.page.startswith("gpu_plans.md")]
    assert [rule.calls for rule in rules if untimed(rule)] == []
    assert untimed(rules[0]._replace(names=("fa2", "fa3", "triton"))) == ["fa2", "fa3"]
