"""The build step that pyproject.toml cannot say: the optional native library goes into wheels and editable installs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

REPOSITORY = "https://github.com/adaattn/adaattn-hf"
PLACE = Path("adaattn_hf") / "backends" / "native"
native = runpy.run_path(str(Path(__file__).parent / PLACE / "build.py"))
built: list[bool] = []


def build_native(target: Path) -> None:
    report = native["build"](target)
    built.append(bool(report["built"]))
    levels = ", ".join(report["levels"])
    print(f"native library: {levels}" if report["built"] else f"native library: not built: {report['reason']}")


class BuildNative(Command):
    """`python setup.py build_native`: compile in place."""

    description = "compile the native library in place"
    user_options: list[tuple[str, str | None, str]] = []  # noqa: RUF012  (so does setuptools)

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        build_native(Path(__file__).parent / PLACE)


class BuildPy(build_py):
    """Copies the Python files, then compiles; in an editable install the library lands beside its sources."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            build_native(Path(__file__).parent / PLACE)
            return
        # Of an earlier build: the library, modules that are gone, objects of a compile that was killed. Built in place
        # (`--build-lib .`), what else lies there is the checkout's own.
        made = {Path(path) for path in self.get_outputs(include_bytecode=False)}
        in_place = Path(self.build_lib).samefile(Path(__file__).parent)
        for top in () if in_place else {name.partition(".")[0] for name in self.packages}:
            for path in Path(self.build_lib, top).rglob("*"):
                if path.is_file() and path not in made:
                    path.unlink()
        build_native(Path(self.build_lib) / PLACE)


class Wheel(bdist_wheel):
    """The library depends on the platform and not on the version of Python; without it, on neither."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return ("py3", "none", platform) if any(built) else ("py3", "none", "any")


class WithLibrary(Distribution):
    """Is installed where binaries belong; otherwise the wheel would carry all files in a side directory."""

    def has_ext_modules(self) -> bool:
        return True


def description() -> str:
    """The README with its links to files made absolute: the package index shows it away from them."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://)", rf"\1{REPOSITORY}/raw/main/", text)  # pictures, not pages about them
    return re.sub(r"\]\((?!https?://|#)([^)]+)\)", rf"]({REPOSITORY}/blob/main/\1)", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    distclass=WithLibrary,
    cmdclass={"build_native": BuildNative, "build_py": BuildPy, "bdist_wheel": Wheel},
)
