"""What the kernel repositories of `hub/` take from the package stands alone: torch, Triton and the standard library."""

from __future__ import annotations

import runpy

import pytest

from ..support.source_tree import ROOT

BUILDER = runpy.run_path(str(ROOT / "hub" / "build.py"))


@pytest.mark.parametrize("name", BUILDER["NAMES"])
def test_no_import_leads_out_of_a_kernel(name: str) -> None:
    """The build refuses whatever else a module imports, here before it comes to a build."""
    modules = BUILDER["package_modules"](name)
    assert {"attention/structure.py", "backends/native/call.py", "backends/triton/launch.py"} <= set(modules)
