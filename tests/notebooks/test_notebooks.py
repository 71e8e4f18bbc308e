"""The notebooks as they are committed: all cells have run, in order, without an error, and pictures are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_four() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["1_", "2_", "3_", "4_"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_from_top_to_bottom(path: Path) -> None:
    notebook: Any = json.loads(path.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run make notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert len(outputs) >= 3
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert path.stat().st_size < 1_000_000


def test_the_notebooks_that_show_curves_hold_them() -> None:
    for path in NOTEBOOKS:
        if path.stem.startswith(("1_", "4_")):
            assert '"image/png"' in path.read_text(), path.name
