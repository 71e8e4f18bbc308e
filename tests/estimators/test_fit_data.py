"""Rows and checkpoints of fits whose workers cannot see this machine's disk."""

from __future__ import annotations

import contextlib
import sys

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import survivors
import torch.nn.functional as F
from survivors import KillingLoss, estimator, what_was_learned

from hvd_cluster.data.store import LocalStore
from hvd_cluster.estimators import LocalBackend
from hvd_cluster.estimators.fit_data import FrameData, Layout
from hvd_cluster.estimators.frames import Frame
from hvd_cluster.estimators.run.data_module import PetastormDataModule

cloudpickle.register_pickle_by_value(survivors)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class RemoteBackend(LocalBackend):
    """Claims that its workers cannot see this machine's disk."""

    is_far = True


@pytest.mark.parametrize("kind", ["pandas", "arrow"])
def test_remote_workers_need_a_store_for_rows_on_the_drivers_disk(frame, kind):
    data = frame[["x", "y"]] if kind == "pandas" else pa.Table.from_pandas(frame[["x", "y"]])
    with pytest.raises(ValueError, match=r"store is required: the workers of RemoteBackend are on other machines"):
        estimator(F.mse_loss, backend=RemoteBackend(1)).fit(data)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": Frame.PARQUET, "validation": "v"}, "cannot be read where it is"),
        ({"kind": Frame.PARQUET, "validation": 0.2, "has_module": True}, "cannot be read where it is"),
        ({"kind": Frame.SPARK, "backend": LocalBackend(1)}, "does not send the rows of a Spark DataFrame"),
        ({"kind": Frame.PARQUET, "validation": 0.2}, None),
        ({"kind": Frame.PANDAS, "has_store": True}, None),
        ({"kind": Frame.PANDAS, "backend": LocalBackend(1)}, None),
    ],
)
def test_a_store_is_required_if_rows_cannot_reach_workers_without_it(given, text):
    usual = {"data": None, "backend": RemoteBackend(1), "has_store": False, "has_module": False, "validation": None}
    data = FrameData(**{**usual, **given})
    if text is None:
        data.require_store()
        return
    with pytest.raises(ValueError, match=f"store is required: .*{text}.*; give a folder"):
        data.require_store()


def test_a_data_module_cannot_read_spark_rows_without_a_store():
    class Sends(LocalBackend):
        brings_rows = True

    data = FrameData(kind=Frame.SPARK, data=None, backend=Sends(1), has_store=False, has_module=True, validation=None)
    with pytest.raises(ValueError, match=r"store is required: a data_module reads Parquet"):
        data.require_store()


class FullTrash(LocalStore):
    """Deletes no rows, as NFS while another process has a file open."""

    def delete(self, path):
        if path == self.get_train_data_path("one"):
            raise OSError(f"[Errno 39] Directory not empty: {path!r}")
        super().delete(path)


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_cannot_be_removed_cost_no_model_and_hide_no_error(frame, tmp_path, caplog, fails):
    data = FrameData(
        kind=Frame.PANDAS, data=frame, backend=LocalBackend(1), has_store=True, has_module=False, validation=None
    )
    layout = Layout(columns=["x", "y"], num_proc=1, partitions_per_process=1, seed=0, allow_ragged=False)
    outcome = pytest.raises(KeyError, match="of the fit") if fails else contextlib.nullcontext()
    with outcome, data.prepared(FullTrash(str(tmp_path)), "one", layout):
        if fails:
            raise KeyError("of the fit")
    (text,) = [text for text in caplog.messages if "Directory not empty" in text]
    assert f"the rows of the fit were not removed; delete {tmp_path}/" in text


def test_a_data_module_of_remote_workers_reads_parquet_in_place_without_a_store(frame, tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pandas(frame[["x", "y"]], preserve_index=False), tmp_path / "data" / "a.parquet")
    given = {"backend": RemoteBackend(1, verbose=0), "validation": None, "checkpoint_every_steps": None}
    model = estimator(F.mse_loss, data_module=PetastormDataModule, **given).fit(tmp_path / "data")
    assert len(model.getHistory()) == 3


@pytest.mark.slow
def test_the_best_epoch_survives_a_death_if_checkpoints_are_sent_to_the_driver(frame, one_worker, tmp_path):
    pq.write_table(pa.Table.from_pandas(frame[["x", "y"]], preserve_index=False), tmp_path / "a.parquet")

    def fitted(loss, backend):
        # A huge rate from the second epoch on: the first one stays the best.
        fit = estimator(loss, backend=backend, return_best=True, epochs=3)
        return fit.setLrScheduler(_diverges).setLrSchedulerInterval("epoch").fit(tmp_path / "a.parquet")

    killed = fitted(KillingLoss([tmp_path / "killed"], rank=0, at=50), RemoteBackend(1, verbose=0))
    undisturbed = fitted(F.mse_loss, one_worker)
    assert (tmp_path / "killed").exists()
    losses = [record["validation"]["loss"] for record in killed.getHistory()]
    assert min(losses) == losses[0] < losses[-1]
    assert what_was_learned(killed) == what_was_learned(undisturbed)


def _diverges(optimizer):
    import torch

    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch == 0 else 1e6)


class UnreachableDriver(RemoteBackend):
    """As on a remote Connect server: workers cannot open a connection to the driver."""

    driver_is_out_of_reach = True

    def run(self, fn, args=(), kwargs=None, env=None):
        (self.spec,) = args
        self.events = []
        return super().run(fn, args, kwargs, env, on_event=lambda rank, fields: self.events.append(fields))


def test_a_fit_without_connection_and_store_warns_that_it_has_no_checkpoints(frame, tmp_path, caplog):
    pq.write_table(pa.Table.from_pandas(frame[["x", "y"]], preserve_index=False), tmp_path / "a.parquet")
    backend = UnreachableDriver(1, verbose=0)
    model = estimator(F.mse_loss, backend=backend, epochs=2, return_best=True).fit(tmp_path / "a.parquet")
    assert len(model.getHistory()) == 2
    assert [record for record in caplog.messages if "no progress bar and no checkpoints" in record]
    assert not backend.spec.report_through_store
    assert backend.events
    assert not [fields for fields in backend.events if "checkpoint" in fields]
