from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from hvd_cluster.data.store import Store
from hvd_cluster.estimators.run.worker_run import WorkerRun


def run_of(folder):
    """A run of one worker that leaves rows out."""
    spec = SimpleNamespace(
        store=Store.create(folder),
        run_id="r",
        store_on_driver=False,
        resume=None,
        resume_best=None,
        report_through_store=False,
        dataset=SimpleNamespace(schema=(), train=SimpleNamespace(rows=1, snapshot=None), validation=None),
        inputs=SimpleNamespace(feature_cols=(), label_cols=()),
        preprocess=SimpleNamespace(on_error="skip"),
        has_validation=False,
    )
    hvd = SimpleNamespace(
        rank=lambda: 0,
        local_rank=lambda: 1,
        broadcast_object=lambda found, name: found,
        allgather_object=lambda own, name: [own],
    )
    return WorkerRun(spec, hvd)


@pytest.fixture
def frequent_switches():
    """Threads that take turns as often as Python lets them."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_rows_of_batches_that_another_thread_reads_ahead_are_counted(tmp_path, frequent_switches):
    run, epochs, batches = run_of(tmp_path), 15, 100
    batch, ahead, are_read, found = SimpleNamespace(num_left_out=1), threading.Semaphore(1), [], []

    def read():
        for epoch in range(epochs):
            ahead.acquire()  # reads an epoch while the one before it is counted
            for _ in run.timed([batch] * batches, epoch, 0):
                pass
            are_read.append(epoch)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for epoch in range(epochs):
            ahead.release()
            while len(are_read) < min(epoch + 2, epochs):
                run.start_epoch()
                run.left_out_rows()
            found.append(run.left_out_rows()["left_out_rows"])
            run.history.append({})
    finally:
        ahead.release(epochs)
        reader.join()
    assert found == [batches] * epochs
