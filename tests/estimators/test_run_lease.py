"""Only one program at a time fits a run, and data of dead programs is removed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.store import Store
from hvd_cluster.errors import RunInUseError
from hvd_cluster.estimators import Backend, TorchEstimator, run_lease
from hvd_cluster.estimators.run_lease import Holder, RunLease

HOLDS = """
import sys, time
from hvd_cluster.data.store import Store
from hvd_cluster.estimators.run_lease import RunLease
with RunLease(Store.create(sys.argv[1]), "run") as lease:
    print(lease.token, flush=True)
    time.sleep(600)
"""


def elsewhere(store, **fields):
    """The lease of a program on another machine; returns its path and its content."""
    content = {**vars(Holder.here("run")), "host": "far", "system": "another", "state": "held", **fields}
    path = f"{store.prefix}/.leases/{run_lease._hash('run')}.{'0' * 32}.json"
    store.write(path, json.dumps(content))
    return path, content


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return Store.create(f"memory://leases{time.monotonic_ns()}")
    return Store.create(tmp_path)


def test_a_second_program_is_rejected_with_the_name_of_the_first(store):
    with RunLease(store, "run"):
        with pytest.raises(RunInUseError, match=rf"process {os.getpid()} on host {socket.gethostname()}, since 20"):
            RunLease(store, "run").__enter__()
        with RunLease(store, "another"):
            pass
    with RunLease(store, "run"):
        pass
    assert store.list(f"{store.prefix}/.leases") == []


def test_only_one_of_many_simultaneous_fits_gets_the_run(store):
    entered, refused, over = [], [], threading.Event()

    def enter():
        try:
            with RunLease(store, "run") as lease:
                entered.append(lease)
                over.wait(60)
        except RunInUseError as error:
            refused.append(error)

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(entered) + len(refused) < len(threads):
        time.sleep(0.01)
    over.set()
    for thread in threads:
        thread.join()
    assert (len(entered), len(refused)) == (1, 5)


def test_a_killed_program_loses_its_lease_and_its_data(tmp_path):
    store = Store.create(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    token = child.stdout.readline().strip()
    left, kept = (Path(store.get_train_data_path(name)) for name in (token, "of_a_user"))
    for folder in (left, kept):
        folder.mkdir(parents=True)
    with pytest.raises(RunInUseError, match=f"process {child.pid} on host"):
        RunLease(store, "run").__enter__()
    child.send_signal(signal.SIGKILL)
    while run_lease._start_of(child.pid) is not None:  # a zombie counts as dead
        time.sleep(0.01)
    with RunLease(store, "another"):
        pass
    assert not left.exists()
    assert kept.exists()
    with RunLease(store, "run"):
        pass
    child.wait()
    child.stdout.close()


def test_a_lease_of_another_machine_is_valid_while_it_is_renewed(store, monkeypatch):
    path, content = elsewhere(store)
    over = threading.Event()

    def renew():
        while not over.wait(0.05):
            content["count"] += 1
            store.write(path, json.dumps(content))

    thread = threading.Thread(target=renew)
    thread.start()
    with pytest.raises(RunInUseError, match="on host far"):
        RunLease(store, "run").__enter__()
    over.set()
    thread.join()
    monkeypatch.setattr(run_lease, "_EXPIRY_S", 0.3)
    with RunLease(store, "run"):  # clocks of other machines do not matter
        assert not store.exists(path)


def test_a_lease_that_is_being_written_is_read_again(store, monkeypatch):
    path, content = elsewhere(store)
    read_store, numbers = store.read, itertools.count()

    def read(asked):
        complete = read_store(asked)
        if asked != path:
            return complete
        number = next(numbers)  # another program renews the lease, and is seen while it writes
        renewed = json.dumps({**content, "count": number}).encode()
        return renewed if number % 2 else renewed[:40]

    monkeypatch.setattr(store, "read", read)
    with pytest.raises(RunInUseError, match="on host far"):
        RunLease(store, "run").__enter__()


def test_half_of_a_lease_that_is_never_completed_does_not_hold_the_run(store, monkeypatch):
    monkeypatch.setattr(run_lease, "_MAX_READS", 2)
    path, _ = elsewhere(store)
    store.write(path, store.read(path)[:20])
    with RunLease(store, "run"):
        pass


def test_a_program_that_did_not_renew_its_lease_stops(store, monkeypatch):
    monkeypatch.setattr(run_lease, "_RENEWAL_S", 0.05)
    with RunLease(store, "run") as lease:
        lease.require_held()
        store.delete(lease._path(lease.token, "run"))
        lease._thread.join()
        with pytest.raises(RunInUseError, match="another fit has taken the run over"):
            lease.require_held()


def test_two_simultaneous_fits_of_a_run_are_rejected(frame, one_worker, tmp_path):
    model = torch.nn.Linear(4, 1)
    given = {"loss": F.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "verbose": 0, "run_id": "mine"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    refused = []

    class Meanwhile(Backend):
        def run(self, fn, args=(), kwargs=None, env=None):
            estimator = TorchEstimator(model=model, optimizer=optimizer, backend=one_worker, store=tmp_path, **given)
            try:
                estimator.fit(frame)
            except RunInUseError as error:
                refused.append(str(error))
            return one_worker.run(fn, args, kwargs, env)

        def num_processes(self):
            return 1

    fitted = TorchEstimator(model=model, optimizer=optimizer, backend=Meanwhile(), store=tmp_path, **given).fit(frame)
    assert len(fitted.getHistory()) == 1
    assert f"run_id='mine' is being fitted by another fit of this program (process {os.getpid()} on host" in refused[0]
