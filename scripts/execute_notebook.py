"""Run a notebook from top to bottom and keep what it shows, without anything that names this machine.

    python scripts/execute_notebook.py examples/first_run.ipynb [--out FILE] [--folder DIR]

Without --out the notebook itself is written again: after a change, this makes its outputs new. It runs in DIR (a
temporary folder unless given), where its runs then lie.
"""

import argparse
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
CELL_SECONDS = 240


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run every cell in `folder`, with the Python that runs this script.

    Raises: CellExecutionError at the first cell that fails.
    """
    NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    ).execute()


def forget_machine(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Make paths relative to the checkout and to the folder it ran in; what Python it was is nobody's business."""
    places = {f"{folder.resolve()}/": "", str(folder.resolve()): ".", f"{ROOT}/": "", str(Path.home()): "~"}
    for cell in notebook.cells:
        if "outputs" in cell:  # tqdm misses ipywidgets, which nothing here needs
            cell.outputs = [output for output in cell.outputs if "TqdmWarning" not in output.get("text", "")]
        for output in cell.get("outputs", []):
            for holder in (output, output.get("data", {})):
                for key, text in holder.items():
                    if isinstance(text, str):
                        holder[key] = _replaced(text, places)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def _replaced(text: str, places: dict[str, str]) -> str:
    for place, shown in places.items():
        text = text.replace(place, shown)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    notebook = nbformat.read(arguments.notebook, as_version=4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        execute(notebook, folder)
        forget_machine(notebook, folder)
    target = arguments.out or arguments.notebook
    nbformat.write(notebook, target)
    print(f"{len(notebook.cells)} cells, {target.stat().st_size / 1000:.0f} kB: {target}")


if __name__ == "__main__":
    main()
