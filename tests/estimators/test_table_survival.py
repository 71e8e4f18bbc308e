"""A fit on a table whose worker is killed in mid-epoch ends with bitwise the weights of an undisturbed fit, while
another process commits to the table."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import survivors
import torch.nn.functional as F
from survivors import KillingLoss, estimator, what_was_learned

from hvd_cluster.data import open_table
from hvd_cluster.estimators import LocalBackend

for package in ("deltalake", "lance", "pyiceberg"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
cloudpickle.register_pickle_by_value(survivors)

PROGRAM = Path(__file__).parent / "scripts" / "commits.py"


@pytest.fixture(scope="module", autouse=True)
def threads() -> None:
    from iceberg_files import start_threads

    start_threads()


def rows() -> pa.Table:
    draw = np.random.default_rng(7)
    x = draw.normal(size=(203, 4)).astype("float32")
    return pa.table(
        {"id": range(203), "x": pa.array(list(x), pa.list_(pa.float32())), "y": x @ np.float32([1, -2, 0.5, 3])}
    )


@contextlib.contextmanager
def committing(kind: str, folder: Path) -> Iterator[None]:
    """Another process appends to the table and deletes from it, in a loop."""
    done = folder / "commits"
    process = subprocess.Popen([sys.executable, str(PROGRAM), kind, str(folder), str(done)])
    try:
        deadline_s = time.monotonic() + 60
        while not done.exists():
            assert process.poll() is None, "the other process ended"
            assert time.monotonic() < deadline_s, "the other process has not committed"
            time.sleep(0.05)
        yield
        assert process.poll() is None, "the other process ended"
    finally:
        process.kill()
        process.wait()
    assert len(done.read_text()) > 1, "there were commits during the fit"


def made(kind: str, folder: Path) -> Any:
    """A new table; what a user would give to open_table."""
    if kind == "delta":
        import deltalake

        deltalake.write_deltalake(str(folder / "t"), rows())
        return folder / "t"
    if kind == "lance":
        import lance

        lance.write_dataset(rows(), str(folder / "t"), max_rows_per_file=100)
        return folder / "t"
    from iceberg_files import catalog_in

    with catalog_in(folder) as catalog:
        table = catalog.create_table("db.t", rows().schema)
        table.append(rows())
        return table


@pytest.mark.parametrize(
    "kind", ["delta", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("iceberg", "lance"))]
)
def test_a_killed_worker_changes_nothing_while_another_process_commits(
    kind: str, two_workers: Any, tmp_path: Path
) -> None:
    table = open_table(made(kind, tmp_path))
    undisturbed = estimator(F.mse_loss, backend=two_workers).fit(table)
    mark = tmp_path / "killed"
    with committing(kind, tmp_path):
        fit = estimator(KillingLoss([mark], at=17), backend=LocalBackend(2, verbose=0), store=tmp_path / "store")
        killed = fit.fit(table)
    assert mark.exists()
    assert what_was_learned(killed) == what_was_learned(undisturbed)
