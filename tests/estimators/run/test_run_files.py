from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hvd_cluster.data.store import Store
from hvd_cluster.estimators.run.run_files import (
    PIECE_BYTES,
    ReceivedFiles,
    RunFiles,
    keep_with_run,
    local_folder,
)
from hvd_cluster.launch import progress


def test_a_checkpoint_is_sent_to_the_driver_in_pieces_and_saved_once_complete(tmp_path):
    store = Store.create(tmp_path)
    blob = os.urandom(2 * PIECE_BYTES + 5)
    sent = []
    progress.attach(sent.append)
    try:
        RunFiles(store, "r", on_driver=True).save(blob)
        RunFiles(store, "r", on_driver=True).save(b"best", best=True)
    finally:
        progress.attach(None)
    received = ReceivedFiles(RunFiles(store, "r"))
    for fields in (sent[0], *sent[:2]):  # a worker that died sent only the beginning
        received.add(fields)
        assert RunFiles(store, "r").last() is None
    for fields in sent:
        received.add(fields)
    assert RunFiles(store, "r").last() == blob
    assert RunFiles(store, "r").best() == b"best"
    assert RunFiles(store, "r", on_driver=True, resume=b"given").last() == b"given"


def test_workers_write_and_read_a_store_that_they_see(tmp_path):
    files = RunFiles(Store.create(tmp_path), "r")
    assert (files.last(), files.best()) == (None, None)
    files.save(b"last")
    files.save(b"best", best=True)
    assert (files.last(), files.best()) == (b"last", b"best")
    silent = RunFiles(Store.create(tmp_path / "other", save_runs=False), "r")
    silent.save(b"last")
    assert silent.last() is None


@pytest.mark.parametrize("save_runs", [True, False])
def test_local_files_are_copied_to_the_run_only_if_the_store_keeps_runs(tmp_path, save_runs):
    store = Store.create(tmp_path / "work", save_runs=save_runs)
    spec = SimpleNamespace(store=store, run_id="r", store_on_driver=False)
    with local_folder(spec) as folder:
        with open(f"{folder}/file", "w") as file:  # noqa: PTH123 - as frameworks do
            file.write("text")
        keep_with_run(spec, folder)
    assert store.exists(f"{store.get_run_path('r')}/file") == save_runs
