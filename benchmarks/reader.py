"""Parquet to shuffled training batches: ours, petastorm's `make_batch_reader` with its `BatchedDataLoader`, and a plain
`pyarrow.dataset` scan that makes no tensors and shuffles nothing. Petastorm runs in an environment of its own
(`make test-matrix` makes it), with the torch of ours; it and ours read with two threads. The last column is
what a reader would reach that costs nothing beyond one scan.

The floats are written plain, as Spark and the estimators write numbers that are mostly distinct, and in one row as
dictionaries, as `pyarrow` does by default. From a cache on disk means an epoch after the first, ours with `DiskCache`,
petastorm with its own `local-disk`; the scan has none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks.report import Report
from hvd_cluster.data.cache import DiskCache
from hvd_cluster.data.reader import ParquetReader

#: Where `make test-matrix` puts it.
PETASTORM_PYTHON = Path(__file__).parents[1] / ".venv-petastorm" / "bin" / "python"
NUM_THREADS = 2
#: More than any of the data sets takes.
CACHE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of data."""

    name: str
    table: Callable[[np.random.Generator], pa.Table]
    group_rows: int
    batch_size: int
    #: Rows that petastorm shuffles among each other: about as many as ours does in its windows.
    shuffle_rows: int = 100_000
    #: Further arguments of our reader.
    options: dict[str, Any] = field(default_factory=dict)
    #: Length that ragged lists are padded to; 0 where there are none.
    ragged_length: int = 0
    #: The columns that are written as dictionaries: True for all.
    dictionaries: bool | list[str] = True
    #: Whether ours and petastorm keep what they read on the disk, from the pass that is not counted.
    cached: bool = False


def wide(random: np.random.Generator, rows: int = 1_000_000) -> pa.Table:
    columns = {f"f{index}": random.standard_normal(rows, dtype="f4") for index in range(20)}
    return pa.table({**columns, "label": random.integers(0, 10, rows)})


def images(random: np.random.Generator, rows: int = 2048) -> pa.Table:
    pixels = pa.array(random.integers(0, 256, rows * 128 * 128 * 3, dtype=np.uint8))
    lists = pa.FixedSizeListArray.from_arrays(pixels, 128 * 128 * 3).cast(pa.list_(pa.uint8()))
    return pa.table({"image": lists, "label": random.integers(0, 10, rows)})


def ragged(random: np.random.Generator, rows: int = 100_000) -> pa.Table:
    lengths = random.integers(1, 129, rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype("i4"))
    tokens = pa.array(random.integers(1, 30_000, int(lengths.sum()), dtype=np.int32))
    return pa.table({"t": pa.ListArray.from_arrays(offsets, tokens), "label": random.integers(0, 2, rows)})


#: The column of the wide floats that Spark writes as a dictionary.
FEW_VALUES = ["label"]

WORKS = [
    Work(
        name="20 float32 and a label, batches of 1024",
        table=wide,
        group_rows=32768,
        batch_size=1024,
        dictionaries=FEW_VALUES,
    ),
    Work(name="the same, batches of 32", table=wide, group_rows=32768, batch_size=32, dictionaries=FEW_VALUES),
    Work(
        name="the same, batches of 32, the floats in one tensor",
        table=wide,
        group_rows=32768,
        batch_size=32,
        dictionaries=FEW_VALUES,
        options={"stack": {"features": [f"f{index}" for index in range(20)]}},
    ),
    Work(
        name="the same, batches of 1024, from a cache on disk",
        table=wide,
        group_rows=32768,
        batch_size=1024,
        dictionaries=FEW_VALUES,
        cached=True,
    ),
    Work(name="the same, batches of 1024, all dictionaries", table=wide, group_rows=32768, batch_size=1024),
    Work(
        name="128x128x3 uint8, batches of 64",
        table=images,
        group_rows=256,
        batch_size=64,
        shuffle_rows=4096,
        options={"shapes": {"image": (128, 128, 3)}},
    ),
    Work(
        name="1 to 128 tokens, padded, batches of 1024",
        table=ragged,
        group_rows=8192,
        batch_size=1024,
        options={"shapes": {"t": (128,)}, "pad": {"t": 0}},
        ragged_length=128,
    ),
]


def ours(work: Work, path: Path) -> int:
    reader = ParquetReader(
        path,
        batch_size=work.batch_size,
        num_threads=NUM_THREADS,
        remainder="partial",
        cache=DiskCache(_cache_folder(path, "ours"), CACHE_BYTES) if work.cached else None,
        **work.options,
    )
    return sum(len(batch["label"]) for batch in reader)


def scan(path: Path) -> int:
    return sum(batch.num_rows for batch in ds.dataset(path).to_batches())


def _cache_folder(path: Path, whose: str) -> Path:
    return path.with_name(f"{whose}-cache")


def torch_for(folder: Path) -> Path:
    """A folder with our torch and what it imports, for an environment of the same Python that lacks it."""
    site = Path(np.__file__).parents[1]
    names = ["torch", *_requirements("torch")]
    for name in names:
        if name in {"numpy", "setuptools"}:
            continue
        for file in importlib.metadata.files(name) or []:
            top = Path(file.parts[0])
            if top.suffix != ".dist-info" and top.name not in {"..", "__pycache__"} and not (folder / top).exists():
                (folder / top).symlink_to(site / top)
    return folder


def _requirements(name: str) -> set[str]:
    found: set[str] = set()
    for line in importlib.metadata.requires(name) or []:
        needed = re.split(r"[^A-Za-z0-9._-]", line)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(needed)
            if "extra ==" not in line and needed not in found:
                found |= {needed} | _requirements(needed)
    return found


@contextlib.contextmanager
def petastorm(python: Path) -> Iterator[Callable[[Work, Path], dict[str, Any]]]:
    """A process that runs petastorm, and the function that lets it read once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), str(Path(__file__).with_name("petastorm_peer.py"))]
        environment = {"PYTHONPATH": str(torch_for(Path(folder))), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def read(work: Work, path: Path) -> dict[str, Any]:
                request = {
                    "path": str(path),
                    "batch_size": work.batch_size,
                    "num_threads": NUM_THREADS,
                    "ragged_length": work.ragged_length,
                    "shuffle_rows": work.shuffle_rows,
                    "cache": str(_cache_folder(path, "petastorm")) if work.cached else None,
                }
                process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                return json.loads(process.stdout.readline())  # type: ignore[union-attr]

            yield read
            process.stdin.close()


def measure(petastorm_python: Path = PETASTORM_PYTHON, turns: int = 5) -> Report:
    """Rows per second of each, turn by turn.

    Args:
        petastorm_python: the interpreter of an environment with petastorm; its column is empty where there is none.
        turns: passes of each contender over each data set, after one that is not counted.
    """
    there = petastorm_python.exists()
    notes = [] if there else [f"No petastorm: there is no {petastorm_python}; `make test-matrix` makes it."]
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = stack.enter_context(petastorm(petastorm_python)) if there else None
        for work in WORKS:
            path = folder / f"{work.table.__name__}.parquet"
            table = work.table(np.random.default_rng(0))
            pq.write_table(table, path, row_group_size=work.group_rows, use_dictionary=work.dictionaries)
            num_rows = table.num_rows
            del table
            rates: dict[str, list[float]] = {"ours": [], "scan": [], "petastorm": []}
            lost: list[int] = []
            for turn in range(turns + 1):
                seconds = {
                    "ours": _seconds(functools.partial(ours, work, path)),
                    "scan": _seconds(functools.partial(scan, path)),
                }
                if peer is not None:
                    seconds["petastorm"] = whole_pass(functools.partial(peer, work, path), num_rows, lost)
                for name, spent_s in seconds.items():
                    if turn:
                        rates[name].append(num_rows / spent_s)
            path.unlink()
            for whose in ("ours", "petastorm"):
                shutil.rmtree(_cache_folder(path, whose), ignore_errors=True)
            if lost:
                notes.append(
                    f"Passes of petastorm over '{work.name}' that gave too few rows and are not counted: {len(lost)}; "
                    f"they lacked {', '.join(map(str, lost))} of {num_rows:,}."
                )
            rows.append([work.name, *(_rate(rates[name]) for name in rates), *_ratios(rates)])
    columns = ["rows of", "ours, rows/s", "scan, rows/s", "petastorm, rows/s"]
    columns += ["ours / scan", "ours / petastorm", "scan / petastorm"]
    return Report("Parquet to training batches", columns, rows, notes)


def whole_pass(peer: Callable[[], dict[str, Any]], num_rows: int, lost: list[int]) -> float:
    """The seconds of petastorm's next pass that gives all rows; what others lacked is added to ``lost``.

    Its thread pool (0.13.1) asks whether the workers have done all they were given, and then whether all was given to
    them: what is given between the two questions is lost, which happens where threads wait for cores.
    """
    for _ in range(5):
        answer = peer()
        if answer["rows"] == num_rows:
            return float(answer["seconds"])
        lost.append(num_rows - answer["rows"])
    raise RuntimeError(f"petastorm gave too few rows five times in a row, at last {answer['rows']:,} of {num_rows:,}")


def _seconds(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _rate(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f}" if rates else "-"


def _ratios(rates: dict[str, list[float]]) -> list[str]:
    """The medians of one over the other, and the smallest and largest of the turns."""
    cells = []
    for name, peer in (("ours", "scan"), ("ours", "petastorm"), ("scan", "petastorm")):
        ratios = sorted(one / other for one, other in zip(rates[name], rates[peer], strict=False))
        cells.append(f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-")
    return cells
