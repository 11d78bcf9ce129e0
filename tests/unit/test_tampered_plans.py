"""Plans in which any field was replaced by anything: refused by name, or a plan that writes what it read."""

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from adaattn_cli.app import app
from adaattn_hf.plans.plan import Plan, PlanError

from .test_plan import make_plan

PROTOCOL = {
    "settings": {"alpha": 0.05, "aim": "speed"}, "cache": {"stored": "int8", "streaming": True}, "decode": "exact",
    "scoring": {"predicts": "the next token"},
}  # fmt: skip
GOOD: dict[str, Any] = make_plan(protocol=PROTOCOL).to_dict()
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(),
        st.sampled_from([2**31, 2**63, 10**30, 10**400, 1e308, 5e-324, -1]),
        st.sampled_from(["exact", "window", "\x1b[31m", "\ud800", "../../etc/passwd"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    return found + [place for key, one in inner for place in places(one, (*path, key))]


PLACES = places(GOOD)


def tampered(path: tuple[Any, ...], value: Any, remove: bool = False) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    holder: Any = data
    for key in path[:-1]:
        holder = holder[key]
    if remove:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return data


@settings(max_examples=500)
@given(path=st.sampled_from(PLACES), value=ANYTHING, remove=st.booleans())
def test_a_plan_is_refused_by_name_or_is_one(path: tuple[Any, ...], value: Any, remove: bool) -> None:
    data = tampered(path, value, remove)
    try:
        plan = Plan.from_dict(data)
    except PlanError:
        return
    if remove and path[0] == "verified":  # counts of needles, which older files do not have
        assert path[1] in ("needles", "needles_lost")
        data["verified"][path[1]] = 0
    assert json.loads(plan.to_json()) == json.loads(json.dumps(data))


@settings(max_examples=60)
@given(path=st.sampled_from(PLACES), value=ANYTHING)
def test_a_tampered_plan_is_shown_or_refused_in_a_sentence(
    path: tuple[Any, ...], value: Any, tmp_path_factory: Any
) -> None:
    file: Path = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps(tampered(path, value)), encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", "show", str(file), "--html", str(file.with_suffix(".html"))])
    assert result.exit_code in (0, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert not set(result.output) & {"\x1b", "\ud800"}
