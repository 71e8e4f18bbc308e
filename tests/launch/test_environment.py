from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_cluster
from hvd_cluster.launch.checks import checked_variables
from hvd_cluster.launch.environment import (
    agent_environment,
    exportable,
    found_interface_variables,
    interface_variables,
    thread_variables,
    worker_environment,
)
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
    task = {"HOROVOD_SPARK_GPUS": "0,1", "HOROVOD_SPARK_WORK_DIR": "/work", "HOROVOD_ROWS_DIR": "/rows"}
    place = {**outer.to_env(), **task, "HOROVOD_ELASTIC": "1", "TORCHELASTIC_RUN_ID": "7"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    variables = worker_environment(Topology(rank=1, size=2), {})
    assert not {"HOROVOD_WORKER", "HOROVOD_ELASTIC", "MASTER_ADDR", "_HOROVOD_SECRET_KEY", *task} & set(variables)
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
    assert entries[:-1] == ["/launcher", str(Path(hvd_cluster.__file__).parents[1])]
    assert (Path(entries[-1]) / "sitecustomize.py").is_file()


@pytest.mark.parametrize(("path", "kept"), [(":/x", ["", "/x"]), ("/x:", ["/x", ""]), ("", [])])
def test_an_empty_entry_of_pythonpath_stays_the_current_directory(path: str, kept: list[str]) -> None:
    root = str(Path(hvd_cluster.__file__).parents[1])
    entries = worker_environment(Topology(), {"PYTHONPATH": path}, as_horovod=True)["PYTHONPATH"].split(os.pathsep)
    assert entries[1:-1] == [*kept, root]


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
        "XDG_RUNTIME_DIR": "/run/user/0",
        "XDG_CACHE_HOME": "/scratch/cache",
    }
    kept = ("PATH", "LR", "LD_LIBRARY_PATH", "PYTHONPATH", "XDG_CACHE_HOME")
    assert exportable(environ) == {name: environ[name] for name in kept}


def test_values_of_variables_become_strings_and_others_are_named() -> None:
    given = {"A": 1, "B": 0.5, "C": None, "D": Path("/x"), "E": "e", "F": True}
    assert checked_variables(given) == {"A": "1", "B": "0.5", "C": None, "D": "/x", "E": "e", "F": "True"}
    with pytest.raises(TypeError, match=r"(?s)not 2; .*L=\[1\] for the workers must be a string, a number or a path"):
        checked_variables({2: "x", "L": [1]})


def test_interfaces_are_the_first_for_gloo_and_all_for_nccl() -> None:
    both = {"HOROVOD_GLOO_IFACE": "ib1", "NCCL_SOCKET_IFNAME": "ib1,ib0"}
    assert interface_variables("ib1, ib0") == interface_variables(["ib1", "ib0"]) == both
    assert interface_variables({"ib1", "ib0"})["NCCL_SOCKET_IFNAME"] == "ib0,ib1"
    assert interface_variables(None) == interface_variables("") == {}


def test_a_setting_of_the_users_beats_what_the_launcher_finds() -> None:
    assert found_interface_variables("eth0", {}, {}) == interface_variables("eth0")
    assert found_interface_variables("eth0", {"NCCL_SOCKET_IFNAME": "ib0"}, {}) == {"HOROVOD_GLOO_IFACE": "eth0"}
    assert found_interface_variables("eth0", {}, {"HOROVOD_GLOO_IFACE": "x", "NCCL_SOCKET_IFNAME": None}) == {}
    assert found_interface_variables("", {}, {}) == {}
    assert thread_variables({"OMP_NUM_THREADS": "7"}, 2) == {}
    assert int(thread_variables({}, 10_000)["OMP_NUM_THREADS"]) == 1


def test_a_process_that_others_launch_answers_for_horovod_with_its_children() -> None:
    code = "import horovod; print(horovod.__version__)"
    parent = f"""
import subprocess, sys
from hvd_cluster.launch.environment import enable_horovod_import
enable_horovod_import()
{code}
subprocess.run([sys.executable, "-c", {code!r}], check=True)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.28.1"] * 2
