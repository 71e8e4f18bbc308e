"""A reader under TensorFlow's loops, in a process of its own: TensorFlow's import leaves variables behind."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.tf_dataset import to_tf_dataset
from hvd_cluster.errors import DataError, MissingExtraError

with_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed"
)
SETUP = """
import sys
import numpy as np
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.tf_dataset import to_tf_dataset
reader = ParquetReader(sys.argv[1], batch_size=8)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ids = np.arange(50)
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(np.stack([ids, 2 * ids], 1).astype("f4").reshape(-1)), 2)
    pq.write_table(pa.table({"id": ids, "f": pairs}), tmp_path / "a.parquet", row_group_size=7)
    return tmp_path


def run(script: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + script, str(folder)], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_tensorflow_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"extra \[tensorflow\]"):
        to_tf_dataset(ParquetReader(folder, batch_size=8))


@pytest.mark.parametrize("options", [{"batch_size": 64}, {"rank": 50, "size": 51, "remainder": "uneven"}])
def test_a_reader_without_batches_is_refused_where_no_end_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # it is not needed to say so
    with pytest.raises(DataError, match="no batch of its 50 rows"):
        to_tf_dataset(ParquetReader(folder, **{"batch_size": 8, **options}), num_epochs=None)


@with_tensorflow
def test_batches_are_those_of_the_reader(folder: Path) -> None:
    script = """
expected = [batch["id"].tolist() for epoch in (0, 1) for batch in reader.epoch(epoch)]
dataset = to_tf_dataset(reader, num_epochs=2)
assert len(expected) == 12
batches = list(dataset)
assert [batch["id"].numpy().tolist() for batch in batches] == expected
assert batches[0]["f"].shape == (8, 2)
assert batches[0]["f"].numpy().dtype == np.float32
assert reader.position.epoch == 2
"""
    run(script, folder)


@pytest.mark.slow
@with_tensorflow
def test_a_data_set_continues_from_the_position(folder: Path) -> None:
    script = """
expected = [batch["id"].tolist() for batch in reader.epoch(0)]
next(iter(reader))
dataset = to_tf_dataset(reader, map_batch=lambda batch: (batch["f"], batch["id"]), prefetch=2)
assert [ids.numpy().tolist() for _, ids in dataset] == expected[1:]
try:
    to_tf_dataset(reader, num_epochs=0)
except ValueError as error:
    assert "num_epochs is 0" in str(error)
else:
    raise AssertionError("no epochs were accepted")
"""
    run(script, folder)


@with_tensorflow
@pytest.mark.slow
def test_a_look_at_the_first_batch_costs_that_batch_alone(folder: Path) -> None:
    script = """
expected = [batch["id"].tolist() for batch in reader.epoch(0)]
dataset = to_tf_dataset(reader)
assert [batch["id"].numpy().tolist() for batch in dataset.take(1)] == expected[:1]
assert [batch["id"].numpy().tolist() for batch in dataset] == expected[1:]
"""
    run(script, folder)


@with_tensorflow
@pytest.mark.slow
def test_a_program_that_ends_between_iterations_that_run_ahead_ends(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": np.arange(20_000)}), tmp_path / "a.parquet", row_group_size=4_000)
    script = """
import time
from hvd_cluster.petastorm import make_batch_reader
from hvd_cluster.petastorm.tf_utils import make_petastorm_dataset
from hvd_cluster.data.tf_dataset import of_batches
def slow(row):  # while TensorFlow waits in a call of Python
    time.sleep(0.0001)
    return {"id": row["id"]}
def reading(**options):
    return ParquetReader(sys.argv[1], batch_size=8, transformation_fn=slow, window_bytes=1 << 16, **options)
arrays = reading(arrays="numpy", num_epochs=None)
short = ParquetReader(sys.argv[1], batch_size=8, columns=["id"])
iterations = [
    iter(to_tf_dataset(reading(), num_epochs=None, prefetch=10_000)),
    iter(to_tf_dataset(short, num_epochs=1).repeat().prefetch(1_000_000)),
    iter(of_batches(lambda: iter(arrays), {"id": np.zeros(8, "i8")}, prefetch=10_000)),
    iter(make_petastorm_dataset(make_batch_reader("file://" + sys.argv[1], num_epochs=None)).prefetch(10_000)),
]
for iteration in iterations:
    next(iteration)
"""
    run(script, tmp_path)


@with_tensorflow
@pytest.mark.slow
def test_a_pipeline_that_chooses_how_much_to_prefetch_has_no_thread_that_outsleeps_its_end(folder: Path) -> None:
    script = """
import time
from hvd_cluster.data.tf_dataset import of_batches
def autotunes(dataset):
    return dataset.options().autotune.enabled
asked = 0
def items():
    global asked
    for asked in range(1, 1_000):
        yield np.zeros((8, 2), "f4")
chooses = of_batches(items, np.zeros((8, 2), "f4"))
assert [autotunes(chooses), autotunes(to_tf_dataset(reader, prefetch=-1))] == [False, False]
assert [autotunes(of_batches(items, np.zeros(8), 3)), autotunes(to_tf_dataset(reader))] == [None, None]
iteration = iter(chooses)
next(iteration)
until = time.monotonic() + 60
while asked < 2 and time.monotonic() < until:
    time.sleep(0.01)
assert asked >= 2  # it still takes batches in advance
"""
    run(script, folder)
