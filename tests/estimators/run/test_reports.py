"""Progress through the store, if workers cannot connect to the driver."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import pytest

from hvd_cluster.data.store import Store
from hvd_cluster.estimators import driver
from hvd_cluster.estimators.driver import DriverRun
from hvd_cluster.estimators.run.epochs import EpochListener
from hvd_cluster.estimators.run.reports import Reports, path_of
from hvd_cluster.estimators.view.progress_bar import FitProgressBar


@pytest.mark.long
def test_the_driver_reads_progress_from_the_store_if_workers_cannot_connect(tmp_path):
    store = Store.create(tmp_path)
    spec = SimpleNamespace(run_id="r", store=store, report_through_store=True)
    shown, seen = [], []

    class Bar(FitProgressBar):
        def __call__(self, rank, fields):
            shown.append(fields["step"])

    run = DriverRun(
        backend=None,
        train_fn=None,
        store=store,
        max_restarts=0,
        require_held=lambda: None,
        bar=Bar("r"),
        epochs=EpochListener([seen.append]),
    )

    def on_event(rank, fields):
        run.epochs.add([fields["record"]]) if "record" in fields else run.bar(rank, fields)

    with run._watched(spec, on_event):
        reports = Reports(spec, rank=0)
        Reports(spec, rank=1).step(epoch=0, step=99)
        for epoch in range(2):
            assert reports.is_due(last=True)
            reports.step(epoch=epoch, epochs=2, step=3, steps=3, loss=0.5)
            assert not reports.is_due(last=False)
            reports.epoch({"epoch": epoch, "train": {"loss": 0.5}})
            deadline_s = time.monotonic() + 30
            while len(seen) <= epoch and time.monotonic() < deadline_s:
                time.sleep(0.05)
    assert [record["epoch"] for record in seen] == [0, 1]
    assert shown
    assert set(shown) == {3}
    assert store.exists(path_of(store, "r"))


def test_the_driver_ignores_progress_of_an_earlier_fit_and_half_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "_POLL_S", 0.01)
    polls = queue.Queue()

    class Watched(DriverRun):
        def _progress(self, run_id):
            found = super()._progress(run_id)
            polls.put(None)
            return found

    def poll_twice():  # the first may have begun before the write
        while not polls.empty():
            polls.get()
        for _ in range(2):
            polls.get(timeout=30)

    store = Store.create(tmp_path)
    spec = SimpleNamespace(run_id="r", store=store, report_through_store=True)
    Reports(spec, rank=0).epoch({"epoch": 0, "seconds": 1.0})
    run = Watched(
        backend=None,
        train_fn=None,
        store=store,
        max_restarts=0,
        require_held=lambda: None,
        bar=FitProgressBar("r"),
        epochs=EpochListener([]),
    )
    seen = []
    with run._watched(spec, lambda rank, fields: seen.append(fields)):
        poll_twice()
        assert seen == []
        for half in (b'{"step": {"epo', b"\xff", b""):
            store.write(path_of(store, "r"), half)
            poll_twice()
        assert seen == []
        Reports(spec, rank=0).epoch({"epoch": 0, "seconds": 2.0})
        poll_twice()
    assert seen == [{"record": {"epoch": 0, "seconds": 2.0}}]


def test_an_unwritable_store_loses_only_the_progress(tmp_path, caplog):
    store = Store.create(tmp_path)
    reports = Reports(SimpleNamespace(run_id="r", store=store, report_through_store=True), rank=0)
    (tmp_path / "runs").write_text("where the folder of the runs should be")
    for epoch in range(2):
        reports.step(epoch=epoch, loss=0.5)
    (warning,) = caplog.messages
    assert "the progress of run 'r' cannot be written" in warning
    (tmp_path / "runs").unlink()
    reports.epoch({"epoch": 1})
    assert store.exists(path_of(store, "r"))
