"""Worlds that the user names: some ranks of a launcher, and communicators of mpi4py under a real mpirun."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_cluster.launch import local
from hvd_cluster.rendezvous.communicator import own_address, some_of
from hvd_cluster.topology import Topology

ENV = {"OMP_NUM_THREADS": "1"}
FOUR = Topology(rank=2, size=4, local_rank=2, local_size=4)


def test_the_ranks_of_a_list_are_numbered_in_its_order() -> None:
    found = some_of(FOUR, [3, 2, 0])
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 3, 1, 3)
    assert found.world != some_of(FOUR, [2, 3, 0]).world
    assert some_of(FOUR, [0, 1, 2, 3]) == FOUR
    spread = replace(FOUR, local_rank=0, local_size=2, cross_rank=1, cross_size=2)
    assert (some_of(spread, [2, 3]).local_rank, some_of(spread, [2, 3]).local_size) == (0, 1), "found out later"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0, 1], r"rank 2 called init\(comm=\[0, 1\]\) and is not in that list"),
        ([2, 4], r"names ranks \[4\]; the launcher started 0 to 3"),
        ([2, 2], "names a rank twice"),
        ([], "neither a list of ranks nor a communicator"),
        ([2.0], "neither a list of ranks nor a communicator"),
        ([True, 2], "neither a list of ranks nor a communicator"),
    ],
)
def test_a_list_that_names_no_world_of_this_rank_is_refused(ranks: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"Horovod initialization failed.*{words}"):
        some_of(FOUR, ranks)


def test_sets_of_communicators_do_not_go_with_a_list_of_ranks() -> None:
    """Their processes are named by MPI's COMM_WORLD, of which those outside of the list know nothing."""
    import hvd_cluster.torch as hvd

    half = hvd.ProcessSet([0])
    half.mpi_comm = object()
    with pytest.raises(NotImplementedError, match="takes process sets of ranks"):
        hvd.init(comm=[0], process_sets=[half])
    assert not hvd.is_initialized()


def test_the_place_on_the_host_follows_from_who_is_where() -> None:
    hosts = ["a", "b", "a", "b", "b"]
    found = [replace(Topology(), rank=rank, size=5).with_local_indices(hosts) for rank in range(5)]
    assert [(t.local_rank, t.local_size) for t in found] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [(t.cross_rank, t.cross_size) for t in found] == [(0, 2), (1, 2), (0, 2), (1, 2), (0, 1)]


def test_rank_0_uses_the_address_that_others_have_reached() -> None:
    assert own_address(["a", "a", "b"], ["", "127.0.0.1", "10.0.0.5"]) == "10.0.0.5"
    assert own_address(["a", "a"], ["", "127.0.0.1"]) == "127.0.0.1"
    assert own_address(["a"], [""]) == "127.0.0.1"


@pytest.mark.slow
def test_two_lists_make_two_worlds_at_once() -> None:
    def fn() -> list[tuple[int, int, int, int, float]]:
        import os

        import hvd_cluster.torch as hvd

        number = int(os.environ["HOROVOD_RANK"])
        found = []
        for mine in ([0, 3] if number in (0, 3) else [2, 1], [number], [3, 2, 1, 0]):
            hvd.init(comm=mine)
            total = hvd.allreduce(torch.tensor([10.0**number]), op=hvd.Sum).item()
            found.append((hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total))
            hvd.shutdown()
        with pytest.raises(ValueError, match="Horovod initialization failed"):
            hvd.init(comm=[(number + 1) % 4])
        assert not hvd.is_initialized()
        return found

    found = local.run(fn, num_proc=4, env=ENV)
    assert [result[0] for result in found] == [
        (0, 2, 0, 2, 1001.0),
        (1, 2, 1, 2, 110.0),
        (0, 2, 0, 2, 110.0),
        (1, 2, 1, 2, 1001.0),
    ]
    assert [result[1] for result in found] == [(0, 1, 0, 1, 10.0**rank) for rank in range(4)]
    assert [result[2] for result in found] == [(3 - rank, 4, 3 - rank, 4, 1111.0) for rank in range(4)]


MPIRUN = shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun (Debian: openmpi-bin) or mpi4py is not installed",
)
SCRIPT = """
import sys, torch, hvd_cluster.torch as hvd
from mpi4py import MPI
world = MPI.COMM_WORLD
number = world.Get_rank()
def report(what):
    total = hvd.allreduce(torch.tensor([10.0 ** number]), op=hvd.Sum).item()
    place = f"{hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}"
    print(f"{what} {number}: {place}, {total:g};", flush=True)
    hvd.shutdown()
for _ in range(2):
    hvd.init(comm=world)
    report("world")
half = world.Split(number % 2, -number)
hvd.init(comm=half)
report("half")
hvd.init()
report("none")
hvd.init(comm=[2, 0]) if number != 1 else hvd.init(comm=[1])
report("list")
split = hvd.ProcessSet(half)
together = hvd.ProcessSet([0, 1])
hvd.init(comm=world, process_sets=[split, together])
total = hvd.allreduce(torch.tensor([10.0 ** number]), op=hvd.Sum, process_set=split).item()
print(f"set {number}: {split.ranks}, id {split.process_set_id} and {together.process_set_id}, {total:g};", flush=True)
hvd.barrier()  # one rank's shutdown is everyone's: the other set may not have begun
hvd.shutdown()
between = half.Create_intercomm(0, world, 1 if number % 2 == 0 else 2)
for wrong in (MPI.COMM_NULL, between):
    try:
        hvd.init(comm=wrong)
    except ValueError as error:
        print("refused:" + str(error).split(":")[0] + ";", flush=True)
"""


@pytest.mark.slow
@needs_mpi
def test_communicators_of_mpi4py_make_worlds_under_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-np", "3", sys.executable, str(script)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    # Open MPI leaves its session folder behind where TMPDIR says.
    done = subprocess.run(
        command,
        env={**environ, **ENV, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(re.findall(r"(?:world|half|none|list|set|refused)[^;]*(?=;)", done.stdout))
    assert lines == sorted(
        [f"world {i}: {i} of 3, local {i} of 3, 111" for i in range(3)] * 2
        + ["half 0: 1 of 2, local 1 of 2, 101", "half 2: 0 of 2, local 0 of 2, 101", "half 1: 0 of 1, local 0 of 1, 10"]
        + [f"none {i}: {i} of 3, local {i} of 3, 111" for i in range(3)]
        + ["list 0: 1 of 2, local 1 of 2, 101", "list 2: 0 of 2, local 0 of 2, 101", "list 1: 0 of 1, local 0 of 1, 10"]
        + ["set 0: [0, 2], id 1 and 3, 101", "set 1: [1], id 2 and 3, 10", "set 2: [0, 2], id 1 and 3, 101"]
        + ["refused:Horovod initialization failed"] * 6
    )
