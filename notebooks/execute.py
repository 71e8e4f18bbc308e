"""``make notebooks``: run every notebook, or those that are named, and keep what they print and draw in them."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path) -> None:
    """Run one notebook in its folder; the file is written only when all of its cells have run."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which would differ in every commit
        if "outputs" in cell:  # what the JVM, Ray's daemon and native code log names this machine
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr" and "(raylet)" not in output.get("text", "")
            ]
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, path)


for notebook_path in sorted(HERE.glob("*.ipynb")):
    if not sys.argv[1:] or any(name in notebook_path.name for name in sys.argv[1:]):
        sys.stdout.write(f"{notebook_path.name}\n")
        sys.stdout.flush()
        execute(notebook_path)
