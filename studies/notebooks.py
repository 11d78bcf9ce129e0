"""Runs the notebooks and keeps their outputs, without what differs from machine to machine: `make notebooks`.

Progress, paths and how long a step of training took are left out; pictures have few colours, to be small. All else
stays as it was shown.
"""

import argparse
import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
PATHS = re.compile(r"(?<![\w./])/(?:[\w.+-]+/)+")
"""Directories of this machine."""
TIMES = re.compile(
    r"'\w*(?:runtime|per_second|preparation_time)': '[^']*',? ?|\x1b\[(?:2K|\?25)[^\n]*\n?|\x1b\[[0-9;]*m"
)
"""What Trainer says of its speed, lines of progress, and codes of colours."""
COLOURS = 64


def executed(notebook: Any, place: Path) -> Any:
    """Returns a notebook after all its cells ran in a fresh kernel in a directory."""
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(place)}})
    client.execute()
    return notebook


def cleaned(notebook: Any) -> Any:
    """Returns a notebook without progress, times of execution and paths in its outputs."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [kept(one) for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def kept(output: Any) -> Any:
    """Returns an output without paths and times of this machine, its picture in few colours."""
    if "text" in output:
        output["text"] = plain(output["text"])
    data = output.get("data", {})
    if "text/plain" in data:
        data["text/plain"] = plain(data["text/plain"])
    if "image/png" in data:
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB").quantize(COLOURS)
        held = io.BytesIO()
        picture.save(held, "png", optimize=True)
        data["image/png"] = base64.b64encode(held.getvalue()).decode("ascii")
    return output


def plain(text: str) -> str:
    """Returns a text without paths and times of this machine."""
    return TIMES.sub("", PATHS.sub("", text))


def main() -> None:
    """Run those that are named, else all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT / "notebooks").glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as place:
            notebook = cleaned(executed(nbformat.read(path, as_version=4), Path(place)))
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
