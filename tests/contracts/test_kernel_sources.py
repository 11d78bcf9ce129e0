"""What the kernel repositories of `hub/` take from the package stands alone: torch, Triton and the standard library."""

from __future__ import annotations

import ast
import runpy
from typing import get_args

import pytest

from adaattn_hf.plans.fit import TensorsOf

from ..support.source_tree import ROOT

BUILDER = runpy.run_path(str(ROOT / "hub" / "build.py"))


@pytest.mark.parametrize("name", BUILDER["NAMES"])
def test_no_import_leads_out_of_a_kernel(name: str) -> None:
    """The build refuses whatever else a module imports, here before it comes to a build."""
    modules = BUILDER["package_modules"](name)
    assert {"attention/structure.py", "backends/native/call.py", "backends/triton/launch.py"} <= set(modules)


def test_the_planned_kernel_takes_what_plans_hand_its_finder_of_tensors() -> None:
    """The kernel's own modules are built apart; this is the one function of theirs that the package calls."""
    source = (ROOT / "hub" / "adaattn" / "torch-ext" / "adaattn" / "forward.py").read_text(encoding="utf-8")
    finder = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "_no_tensors"
    )
    assert len(finder.args.args) == len(get_args(TensorsOf)[0])
