"""A world without a launcher of ours: torchrun for real, MPI by the variables that it sets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from hvd_cluster.rendezvous import bootstrap
from hvd_cluster.rendezvous.bootstrap import join_store
from hvd_cluster.rendezvous.server import JoinedStore
from hvd_cluster.rendezvous.sockets import ReservedPort
from hvd_cluster.topology import Topology

SCRIPT = """
import torch, hvd_cluster.torch as hvd
for turn in range(2):
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    print(f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()}: {total:g}", flush=True)
    hvd.shutdown()
"""
TORCH_SCRIPT = """
import torch, torch.distributed as dist, hvd_cluster.torch
dist.init_process_group("hvd"{how})
tensor = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
print(f"{{dist.get_backend()}} {{dist.get_rank()}}: {{tensor.item():g}}", flush=True)
dist.destroy_process_group()
"""
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD", "OMPI", "PMI", "SLURM"))}
EXPECTED = ["rank 0 of 2, local 0: 3"] * 2 + ["rank 1 of 2, local 1: 3"] * 2


def test_a_script_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**CLEAN, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}  # torchrun leaves its log folder behind
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    # Two processes write to one pipe: their lines may run into each other.
    assert sorted(re.findall(r"rank \d of 2, local \d: 3", done.stdout)) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", ', init_method="hvd://"'])
def test_the_backend_of_torch_distributed_works_under_torchrun(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCH_SCRIPT.format(how=how))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**CLEAN, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"hvd \d: 3", done.stdout)) == ["hvd 0: 3", "hvd 1: 3"]


@pytest.mark.slow
@pytest.mark.parametrize("namespace", ["prterun-host-1234@1", ""], ids=["named job", "unnamed job"])
def test_ranks_of_one_host_under_mpi_meet_through_the_kernel(namespace: str) -> None:
    processes = []
    for rank in range(2):
        mpi = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": namespace,
        }
        env = {**CLEAN, **mpi, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True))
    lines = [line for process in processes for line in process.communicate(timeout=90)[0].splitlines()]
    assert sorted(lines) == EXPECTED


@pytest.fixture
def join_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], JoinedStore]:
    """``join_from(namespace, rank)``: rank of two, under a launcher without a name, in that pid namespace."""
    seen = threading.local()
    readlink = Path.readlink

    def seen_here(path: Path) -> Path:
        return Path(seen.namespace) if str(path) == "/proc/self/ns/pid" else readlink(path)

    def join(namespace: str, rank: int) -> JoinedStore:
        seen.namespace = namespace
        return join_store(Topology(rank=rank, size=2, local_rank=rank, local_size=2, launcher="pmi"), 0, 10)

    monkeypatch.setattr(Path, "readlink", seen_here)
    return join


def test_unnamed_jobs_in_two_containers_with_the_hosts_network_do_not_meet(
    join_from: Callable[[str, int], JoinedStore],
) -> None:
    jobs = ["pid:[1]", "pid:[2]"]  # the launchers' process ids are equal
    with ThreadPoolExecutor() as threads, contextlib.ExitStack() as servers:
        found = [threads.submit(join_from, job, rank) for rank in range(2) for job in jobs]
        for job in range(2):
            host, visitor = found[job].result(), found[job + 2].result()
            assert host.server is not None
            servers.enter_context(host.server)
            assert visitor.topology.secret == host.topology.secret


@pytest.mark.parametrize("parent", [0, 1])
def test_ranks_of_an_unnamed_job_meet_from_a_container_each(
    parent: int, join_from: Callable[[str, int], JoinedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: parent)
    with ThreadPoolExecutor() as threads:
        host, visitor = threads.map(join_from, ["pid:[1]", "pid:[2]"], [0, 1])
        assert host.server is not None
        with host.server:
            assert visitor.topology.secret == host.topology.secret


def test_ranks_under_torchrun_pass_over_what_the_round_before_has_left_in_the_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        Topology(rank=rank, size=2, launcher="torchrun", job_id="job", master=f"127.0.0.1:{store.port}")
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        found = []
        for _ in range(2):  # a node has come or gone, which does not count as a restart
            second = pool.submit(join_store, ranks[1], 0, 30.0)
            time.sleep(0.5)
            joined = [join_store(ranks[0], 0, 30.0), second.result(60)]
            assert joined[0].topology.rendezvous == joined[1].topology.rendezvous
            found.append(joined[0].topology.rendezvous)
            assert joined[0].server is not None
            joined[0].server.close()
    assert found[0] != found[1]


def test_a_launcher_that_names_a_store_is_taken_at_its_word() -> None:
    ours = Topology(rank=1, size=2, local_rank=1, local_size=2, rendezvous="10.0.0.1:5", secret=b"s")
    assert join_store(ours, 0, 1.0).topology is ours


def recorded(launcher: str, rank: int) -> dict[str, str]:
    """What srun and jsrun set for one of two ranks on two hosts."""
    if launcher == "slurm":
        return {
            "SLURM_JOB_ID": "1234",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_STEP_NODELIST": "host[0-1]",
            "SLURMD_NODENAME": f"host{rank}",
        }
    return {
        "LSB_JOBID": "77",
        "PMIX_NAMESPACE": "77",
        "PMIX_RANK": str(rank),
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": "2",
        "JSM_NAMESPACE_LOCAL_RANK": "0",
        "JSM_NAMESPACE_LOCAL_SIZE": "1",
    }


@pytest.mark.parametrize("launcher", ["slurm", pytest.param("lsf", marks=pytest.mark.slow)])
def test_ranks_on_several_hosts_meet_in_a_folder_that_they_share(launcher: str, tmp_path: Path) -> None:
    processes = []
    for rank in range(2):
        env = {**CLEAN, **recorded(launcher, rank), "OMP_NUM_THREADS": "1", "HOROVOD_RENDEZVOUS_FOLDER": str(tmp_path)}
        processes.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True))
    lines = [line for process in processes for line in process.communicate(timeout=90)[0].splitlines()]
    assert sorted(lines) == ["rank 0 of 2, local 0: 3"] * 2 + ["rank 1 of 2, local 0: 3"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_ranks_on_several_hosts_without_a_way_to_meet_are_told_what_to_use(tmp_path: Path) -> None:
    lost = Topology(rank=0, size=4, local_rank=0, local_size=2, cross_size=2, launcher="openmpi")
    with pytest.raises(ConnectionError, match=r"started by openmpi, which says nothing .* hvdrun, torchrun"):
        join_store(lost, 0, 1.0)
    named = replace(lost, job_id="never")
    for rank in (0, 2):
        with pytest.raises(ConnectionError, match=r"did not meet the others in 0\.3 s in .* HOROVOD_RENDEZVOUS_FOLDER"):
            join_store(replace(named, rank=rank), 0, 0.3, folder=str(tmp_path / "meet"))
    assert list((tmp_path / "meet").iterdir()) == []


def test_a_note_that_others_could_read_is_not_trusted(tmp_path: Path) -> None:
    topology = Topology(rank=1, size=2, cross_rank=1, cross_size=2, launcher="openmpi", job_id="job")
    name = f"meeting-{hashlib.sha256(b'hvd_cluster/job/0.0/').hexdigest()[:24]}.json"
    (tmp_path / name).write_text('{"addresses": ["127.0.0.1"], "port": 1, "secret": "00"}')
    (tmp_path / name).chmod(0o644)
    with pytest.raises(ConnectionError, match="other users may read it"):
        join_store(topology, 0, 1.0, folder=str(tmp_path))


@pytest.mark.slow
def test_a_note_that_a_dead_job_has_left_is_passed_over(tmp_path: Path) -> None:
    ranks = [
        Topology(rank=rank, size=2, cross_rank=rank, cross_size=2, launcher="openmpi", job_id="again")
        for rank in (0, 1)
    ]
    name = f"meeting-{hashlib.sha256(b'hvd_cluster/again/0.0/').hexdigest()[:24]}.json"
    with ReservedPort() as nobody:
        (tmp_path / name).write_text(json.dumps({"addresses": ["127.0.0.1"], "port": nobody.port, "secret": "00"}))
        (tmp_path / name).chmod(0o600)
        with ThreadPoolExecutor() as threads:
            visitor = threads.submit(join_store, ranks[1], 0, 20.0, folder=str(tmp_path))
            host = join_store(ranks[0], 0, 20.0, folder=str(tmp_path))
            found = visitor.result()
    assert host.server is not None
    host.server.close()
    assert found.topology.secret == host.topology.secret != b""
    assert found.topology.rendezvous.endswith(f":{host.server.port}")


def test_rank_0_listens_only_on_the_interface_that_is_named(tmp_path: Path) -> None:
    ranks = [
        Topology(rank=rank, size=2, cross_rank=rank, cross_size=2, launcher="openmpi", job_id="named")
        for rank in (0, 1)
    ]
    with ThreadPoolExecutor() as threads:
        visitor = threads.submit(join_store, ranks[1], 0, 20.0, folder=str(tmp_path))
        host = join_store(ranks[0], 0, 20.0, folder=str(tmp_path), interface="lo")
        visitor.result()
    assert host.server is not None
    with host.server as server:
        assert host.topology.rendezvous == f"127.0.0.1:{server.port}"
        with pytest.raises(ConnectionRefusedError):  # all interfaces would answer there
            socket.create_connection(("127.0.0.2", server.port))


def test_a_rank_that_dies_before_it_is_told_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Topology(rank=0, size=2, local_rank=0, local_size=2, launcher="openmpi", job_id="dies")
    address = f"\0hvd_cluster/dies/{here.generation}.0/{here.world}/{os.getuid()}"

    def call_and_go() -> None:
        for _ in range(500):
            with socket.socket(socket.AF_UNIX) as caller:
                try:
                    caller.connect(address)
                    return
                except ConnectionRefusedError:
                    time.sleep(0.02)

    before = set(threading.enumerate())  # other tests' servers may be among them
    caller = threading.Thread(target=call_and_go)

    def is_own_package(_: socket.socket) -> bool:
        caller.join(10)  # what is sent is sent to nobody
        return True

    monkeypatch.setattr(bootstrap, "_is_ours", is_own_package)
    caller.start()
    with pytest.raises(ConnectionError):
        join_store(here, 0, 10)
    assert set(threading.enumerate()) <= before


def test_a_rank_that_never_comes_is_an_error_on_both_sides() -> None:
    here = Topology(rank=0, size=2, local_rank=0, local_size=2, launcher="openmpi", job_id="never")
    with pytest.raises(ConnectionError, match=r"only 1 of 2 ranks called hvd\.init\(\) within 0\.2 s"):
        join_store(here, 0, 0.2)
    with pytest.raises(ConnectionError, match=r"rank 0 did not call hvd\.init\(\) within 0\.2 s"):
        join_store(replace(here, rank=1, local_rank=1), 0, 0.2)
