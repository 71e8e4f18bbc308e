from __future__ import annotations

import os
from pathlib import Path

import pytest

import hvd_cluster
from hvd_cluster.launch.environment import agent_environment, exportable, worker_environment
from hvd_cluster.topology import Topology


def test_the_users_variables_beat_the_topology_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    variables = worker_environment(Topology(rank=1, size=2, secret=b"s"), {"REMOVED": None, "HOROVOD_HOSTNAME": "me"})
    assert variables["KEPT"] == "1"
    assert variables["RANK"] == variables["HOROVOD_RANK"] == "1"
    assert variables["HOROVOD_HOSTNAME"] == "me"
    assert variables["PYTHONUNBUFFERED"] == "1"
    assert not {"REMOVED", "TORCHELASTIC_USE_AGENT_STORE"} & set(variables)
    assert os.environ["RANK"] == "7"


def test_nothing_of_an_outer_job_reaches_the_workers_of_an_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = Topology(rank=3, size=4, rendezvous="10.0.0.1:1", master="10.0.0.1:2", secret=b"o", worker="outer.3")
    place = {**outer.to_env(), "HOROVOD_ELASTIC": "1", "TORCHELASTIC_RUN_ID": "7"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    variables = worker_environment(Topology(rank=1, size=2), {})
    assert not {"HOROVOD_WORKER", "HOROVOD_ELASTIC", "MASTER_ADDR", "_HOROVOD_SECRET_KEY"} & set(variables)
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_CYCLE_TIME"]) == ("1", "2")
    assert not set(place) & set(exportable(os.environ)), "they would be put over the place of a worker on another host"
    assert worker_environment(Topology(), {"HOROVOD_ELASTIC": "1"})["HOROVOD_ELASTIC"] == "1"


def test_the_cores_are_shared_among_the_workers_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert worker_environment(Topology(), {})["OMP_NUM_THREADS"] == str(cores)
    many = Topology(local_size=cores * 2, size=cores * 2)
    assert worker_environment(many, {})["OMP_NUM_THREADS"] == "1"
    assert worker_environment(many, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_environment(many, {})["OMP_NUM_THREADS"] == "5"


def test_a_checkout_is_importable_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    entries = worker_environment(Topology(), {})["PYTHONPATH"].split(os.pathsep)
    assert entries[0] == "/somewhere"
    assert str(Path(hvd_cluster.__file__).parents[1]) in entries
    # On another host the launcher's comes with the task.
    entries = worker_environment(Topology(), {"PYTHONPATH": "/launcher"})["PYTHONPATH"].split(os.pathsep)
    assert entries == ["/launcher", str(Path(hvd_cluster.__file__).parents[1])]


def test_an_agent_finds_the_package_wherever_the_launcher_has_it_from() -> None:
    root = str(Path(hvd_cluster.__file__).parents[1])
    assert agent_environment({}) == {"PYTHONPATH": root}
    assert agent_environment({"PYTHONPATH": "/x"}) == {"PYTHONPATH": f"/x{os.pathsep}{root}"}
    present = {"PYTHONPATH": f"{root}{os.pathsep}/x"}
    assert agent_environment({**present, "HOME": "/root"}) == present


def test_old_names_are_answered_for_when_asked() -> None:
    entries = worker_environment(Topology(), {}, as_horovod=True)["PYTHONPATH"].split(os.pathsep)
    assert (Path(entries[0]) / "horovod/__init__.py").is_file()


def test_other_hosts_get_what_is_not_about_this_one() -> None:
    environ = {
        "PATH": "/bin",
        "LR": "0.1",
        "LD_LIBRARY_PATH": "/lib",
        "PYTHONPATH": "/code",
        "HOME": "/root",
        "HOSTNAME": "here",
        "SSH_AUTH_SOCK": "/tmp/x",
        "BASH_FUNC_f%%": "() { :; }",
        "PWD": "/",
    }
    assert exportable(environ) == {"PATH": "/bin", "LR": "0.1", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "/code"}
