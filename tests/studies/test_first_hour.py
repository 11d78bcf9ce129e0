"""A first hour, walked: what is typed is what the page shows, and what ends otherwise is named."""

from typing import Any

from studies import first_hour


def test_what_is_typed_stands_in_the_pages() -> None:
    found = first_hour.tasks()
    page = (first_hour.ROOT / "docs" / "first_hour.md").read_text(encoding="utf-8")
    assert sum(code in page for _, code, _ in found) == page.count("```bash")  # one is text, and torch has another line
    assert [code for _, code, refused in found if refused] == [
        "adaattn plan show\n", "adaattn eval SmolLM2-135M-Instruct-gguf --data alice.txt\n"
    ]  # fmt: skip
    assert any("explain(model)" in code for _, code, _ in found), "the quickstart is left out"


def test_a_block_that_ends_otherwise_than_the_page_shows_is_named() -> None:
    def walked(*ends: int) -> list[dict[str, Any]]:
        return [
            {"task": "a plan", "command": f"plan {number}\nmore", "seconds": 90.0, "refused": number == 1, "end": end}
            for number, end in enumerate(ends)
        ]

    made = {"device": "cpu", "cpu": "Some Processor", "threads": 2, "commit": "0123456789"}
    walks = {
        name: {"provenance": made, "conditions": "quiet", "blocks": walked(*ends)}
        for name, ends in (("Python 3.11", (0, 1)), ("Python 3.13", (7, 0)))
    }
    assert first_hour.page(walks).splitlines()[-3:] == [
        "| a plan | `plan 0` | 1.5 | 1.5 **ended with 7** |", "| a plan | `plan 1` | 1.5 | 1.5 **ended with 0** |",
        "| all |  | 3.0 | 3.0 |",
    ]  # fmt: skip
