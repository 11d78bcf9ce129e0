"""docs/architecture.md shows the order of backends as it is."""

from adaattn_hf.backends.order import RULES

from ..support.source_tree import ROOT


def table() -> str:
    lines = ["| calls | tried in this order | measured |", "|---|---|---|"]
    for rule in RULES:
        page = f"[{rule.page.partition('.')[0]}](results/{rule.page})" if rule.page else ""
        lines.append(f"| {rule.calls} | {', '.join(f'`{name}`' for name in rule.names)} | {page} |")
    return "\n".join(lines)


def test_the_table_of_the_order_is_that_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_rule_that_was_measured_names_a_page_that_is_there() -> None:
    pages = {rule.page.partition("#")[0] for rule in RULES} - {""}
    assert pages
    assert all((ROOT / "docs" / "results" / page).is_file() for page in pages)
