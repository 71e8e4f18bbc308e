"""A reader under Lightning, which counts steps and never asks an iteration for its end."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PROGRAM = Path(__file__).parent / "programs" / "lightning_epochs.py"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
def test_every_epoch_trains_on_every_row_also_after_a_checkpoint(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "rows.parquet")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for fit in (told["wrapped"], told["plain"]):
        assert fit["steps"] == 30
        assert {epoch: sorted(rows) for epoch, rows in fit["seen"].items()} == {key: list(range(40)) for key in "012"}
    # Lightning keeps the position of a reader that it was given itself. 10 is the last step of an epoch.
    first, second = told["plain"]["seen"]["1"], told["plain"]["seen"]["2"]
    assert told["resumed"]["10"] == {"steps": 30, "seen": {"1": first, "2": second}}
    assert told["resumed"]["15"] == {"steps": 30, "seen": {"1": first[20:], "2": second}}
