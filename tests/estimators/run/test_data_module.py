"""Data modules get folders with exactly their rows, and their arguments take effect."""

from __future__ import annotations

import contextlib
import itertools
import sys

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.dataset import Dataset, Split
from hvd_cluster.data.files.store_families import HDFSStore
from hvd_cluster.data.row_group import RowGroup
from hvd_cluster.data.schema import Column, ColumnKind, Schema
from hvd_cluster.data.store import Store
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import DataModule, TorchEstimator
from hvd_cluster.estimators.run.data_module import PetastormDataModule, arguments
from hvd_cluster.estimators.spec import FitSpec, Inputs

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Whole(DataModule):
    """Records the rows in its folders, and yields them in batches."""

    def __enter__(self):
        import json
        from pathlib import Path

        import pyarrow.parquet as pq

        self.tables = [pq.read_table(path) for path in (self.train_dir, self.val_dir) if path is not None]
        found = [sorted(table["row"].to_pylist()) for table in self.tables]
        if self.cur_shard == 0:
            Path(self.recorded).write_text(json.dumps(found))
        return self

    def _batches(self, table):
        for start in range(0, len(table), self.train_batch_size):
            rows = table.slice(start, self.train_batch_size)
            yield {name: rows[name].to_numpy().astype("float32") for name in ("row", "y")}

    def train_data(self):
        return self._batches(self.tables[0])

    def val_data(self):
        return self._batches(self.tables[1]) if self.has_val else None


def rows_given(recorded, backend, data, module=Whole, **params):
    """The rows of the training folder and of the validation folder, as a module in a worker sees them."""
    import json

    class Recording(module):
        pass

    Recording.recorded = str(recorded)
    net = torch.nn.Linear(1, 1)
    fit = TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-6),
        loss=F.mse_loss,
        feature_cols=["row"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        label_shapes=[[-1, 1]],
        batch_size=8,
        random_seed=3,
        verbose=0,
        backend=backend,
        data_module=Recording,
        **params,
    )
    fit.fit(data)
    return json.loads(recorded.read_text())


def write(path, first, last, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.arange(first, last, dtype="float32")
    pq.write_table(pa.table({"row": rows, "y": rows * 2, **columns}), path)


def test_a_module_over_parquet_does_not_train_on_validation_rows(one_worker, tmp_path):
    for index in range(4):
        write(tmp_path / "data" / f"{index}.parquet", 25 * index, 25 * index + 25)
    train, held_out = rows_given(tmp_path / "record", one_worker, tmp_path / "data", validation=0.2)
    assert sorted(train + held_out) == list(range(100))
    assert 10 < len(held_out) < 30


def test_a_module_over_one_file_does_not_read_other_files(one_worker, tmp_path):
    write(tmp_path / "data" / "a.parquet", 0, 30)
    write(tmp_path / "data" / "b.parquet", 30, 60)
    (train,) = rows_given(tmp_path / "record", one_worker, tmp_path / "data" / "a.parquet", store=tmp_path / "work")
    assert train == list(range(30))
    assert list((tmp_path / "work").rglob("*.parquet")) == []


def test_a_module_over_nested_folders_reads_all_of_them_in_place(one_worker, tmp_path):
    write(tmp_path / "data" / "key=a" / "x.parquet", 0, 30)
    write(tmp_path / "data" / "key=b" / "x.parquet", 30, 60)
    (train,) = rows_given(tmp_path / "record", one_worker, tmp_path / "data")
    assert train == list(range(60))


def test_a_module_over_prepared_parquet_gets_the_folders_of_the_store(one_worker, tmp_path):
    class Recording(Whole):
        recorded = str(tmp_path / "record")

    store = Store.create(tmp_path / "work")
    for part, first, last in (("train", 0, 40), ("val", 40, 50)):
        write(tmp_path / "work" / f"intermediate_{part}_data.7" / "a" / "x.parquet", first, first + 5)
        write(tmp_path / "work" / f"intermediate_{part}_data.7" / "b" / "x.parquet", first + 5, last)
    net = torch.nn.Linear(1, 1)
    given = {"feature_cols": ["row"], "label_cols": ["y"], "input_shapes": [[-1, 1]], "label_shapes": [[-1, 1]]}
    TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-6),
        loss=F.mse_loss,
        backend=one_worker,
        data_module=Recording,
        store=store,
        verbose=0,
        **given,
    ).fit_on_parquet(dataset_idx=7)
    assert (tmp_path / "record").read_text() == str([[float(i) for i in range(40)], [float(i) for i in range(40, 50)]])


@pytest.mark.parametrize("with_store", [True, False])
def test_a_module_over_a_frame_gets_each_part_once(one_worker, tmp_path, with_store):
    rows = np.arange(60, dtype="float32")
    data = pd.DataFrame({"row": rows, "y": rows, "v": rows % 4 == 0})
    more = {"store": tmp_path / "work"} if with_store else {}
    train, held_out = rows_given(tmp_path / "record", one_worker, data, validation="v", **more)
    assert held_out == list(range(0, 60, 4))
    assert sorted(train + held_out) == list(range(60))


class Closing(Whole):
    """Records how its context ends."""

    def __exit__(self, kind, error, traceback):
        from pathlib import Path

        Path(f"{self.recorded}.exit").write_text("nothing" if kind is None else kind.__name__)
        return True  # must not hide the failure of a fit


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_is_exited_with_the_exception_that_ended_training(one_worker, tmp_path, fails):
    def broken(record, model):
        raise KeyError("the user's mistake")

    rows = np.arange(60, dtype="float32")
    given = (tmp_path / "record", one_worker, pd.DataFrame({"row": rows, "y": rows}), Closing)
    with pytest.raises(WorkerFailedError, match="the user's mistake") if fails else contextlib.nullcontext():
        rows_given(*given, callbacks=[broken] if fails else [])
    assert (tmp_path / "record.exit").read_text() == ("KeyError" if fails else "nothing")


def test_a_module_gets_the_storage_options():
    store = Store.create("memory://work", storage_options={"secret": "s"})
    given = arguments(spec_of(store), rank=0, size=1, train_steps=1, val_steps=0)
    assert given["storage_options"] == {"secret": "s"}
    hadoop = HDFSStore("/work", host="namenode", port=8020, user="me", kerb_ticket="/tmp/ticket")
    assert dict(hadoop.storage_options) == {"user": "me", "kerb_ticket": "/tmp/ticket"}
    assert hadoop.prefix == "hdfs://namenode:8020/work"


def test_a_module_gets_the_reader_params(tmp_path):
    spec = spec_of(Store.create(tmp_path), train_reader_threads=3, val_reader_threads=5, reader_pool_type="dummy")
    given = arguments(spec, rank=0, size=1, train_steps=1, val_steps=0)
    names = ("reader_pool_type", "train_reader_worker_count", "val_reader_worker_count")
    assert [given[name] for name in names] == ["dummy", 3, 5]


def spec_of(store, **params):
    split = Split((RowGroup("/work/a.parquet", 0, 60),), 60)
    return FitSpec(
        run_id="r",
        inputs=Inputs(feature_cols=("row",), label_cols=("y",)),
        output_shapes=((1,),),
        dataset=Dataset(store, Schema((Column("row", ColumnKind.NUMERIC, (), "float32"),)), split),
        store=store,
        part_dirs=("a", None),
        batch_size=8,
        val_batch_size=8,
        epochs=1,
        seed=0,
        **params,
    )


@pytest.mark.long
@pytest.mark.parametrize("pool", ["thread", pytest.param("process", marks=pytest.mark.slow), "dummy"])
def test_our_module_follows_the_reader_params(tmp_path, pool):
    write(tmp_path / "data" / "a.parquet", 0, 32)
    given = {"train_batch_size": 8, "val_batch_size": 8, "schema_fields": ["row", "y"], "inmemory_cache_all": True}
    folder = str(tmp_path / "data")
    module = PetastormDataModule(folder, folder, reader_pool_type=pool, **given)
    batches = list(itertools.islice(module.train_data(), 4))
    assert sorted(torch.cat([batch["row"] for batch in batches]).tolist()) == list(range(32))
    assert torch.cat([batch["row"] for batch in module.val_data()]).tolist() == list(range(32))
    (tmp_path / "data" / "a.parquet").unlink()
    assert torch.cat([batch["row"] for batch in module.val_data()]).tolist() == list(range(32))


class Drawn(DataModule):
    """Rows in an order, and with noise, that the random generators of the process give."""

    def __enter__(self):
        import pyarrow.parquet as pq

        self.table = pq.read_table(self.train_dir)
        return self

    def train_data(self):
        order = np.random.permutation(len(self.table))
        x, y = (self.table[name].to_numpy()[order].astype("float32") / 40 for name in ("row", "y"))
        for start in range(0, len(x), self.train_batch_size):
            part = slice(start, start + self.train_batch_size)
            yield {"row": x[part] + 0.1 * torch.randn(len(x[part])).numpy(), "y": y[part]}

    def val_data(self):
        return None


class Loaded(Drawn):
    """The batches of a DataLoader, and noise for all of its passes."""

    def __enter__(self):
        self.noise = torch.from_numpy(np.random.normal(scale=0.01, size=64).astype("float32"))
        return super().__enter__()

    def train_data(self):
        from torch.utils.data import DataLoader, TensorDataset

        row, label = (torch.from_numpy(self.table[name].to_numpy().astype("float32")) / 40 for name in ("row", "y"))
        rows = TensorDataset(row + self.noise[: len(row)], label)
        for x, y in DataLoader(rows, self.train_batch_size, shuffle=True):
            yield {"row": x + 0.1 * torch.randn(len(x)), "y": y}


class EndsIn:
    """A callback that ends the fit after an epoch, once: in training, or between two epochs."""

    def __init__(self, epoch):
        self.epoch = epoch

    def __call__(self, record, model):
        if record["epoch"] == self.epoch:
            raise RuntimeError("ended here")


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize(("module", "rows"), [(Drawn, 40), (Loaded, 43)])
def test_a_module_that_draws_random_numbers_continues_as_if_the_fit_had_not_been_interrupted(
    one_worker, tmp_path, module, rows, every
):
    """``every``: steps between checkpoints; an epoch has five, so that the third one is the last that is saved.

    With 43 rows passes over them have six batches, and begin within epochs.
    """
    write(tmp_path / "data" / "a.parquet", 0, rows)

    def fit(name, *callbacks, epochs=3):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        return TorchEstimator(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
            loss=F.mse_loss,
            feature_cols=["row"],
            label_cols=["y"],
            input_shapes=[[-1, 1]],
            label_shapes=[[-1, 1]],
            batch_size=8,
            epochs=epochs,
            random_seed=3,
            verbose=0,
            backend=one_worker,
            data_module=module,
            store=tmp_path / name,
            run_id="one",
            max_restarts=0,
            callbacks=callbacks,
            checkpoint_every_steps=every,
            checkpoint_every_epochs=1 if every is None else 3,
        ).fit(tmp_path / "data")

    undisturbed = fit("undisturbed").getModel().state_dict()
    with pytest.raises(WorkerFailedError, match="ended here"):
        fit("interrupted", EndsIn(1))
    resumed = fit("interrupted").getModel().state_dict()
    assert {name: value.tolist() for name, value in resumed.items()} == {
        name: value.tolist() for name, value in undisturbed.items()
    }
