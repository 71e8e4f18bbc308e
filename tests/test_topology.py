"""Environments as the launchers set them: torchrun's recorded here, the others' as their documents show them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvd_cluster.topology import (
    PLATFORMS,
    SECRET_VARIABLE,
    Topology,
    export,
    inherited_env,
    join_address,
    split_address,
)

HERE = Topology(
    rank=5,
    size=7,
    local_rank=1,
    local_size=3,
    cross_rank=1,
    cross_size=2,
    host="node-1",
    rendezvous="10.0.0.1:4711",
    secret=bytes(range(32)),
    generation=3,
    job_id="job-1",
    master="10.0.0.2:29500",
    launcher="hvd_cluster",
)

#: torchrun --nnodes=2 --nproc-per-node=2, rank 3.
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "33511",
    "RANK": "3",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "800f1832",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
#: mpirun -np 4 -H a:2,b:2 (Open MPI 4), rank 3.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "3",
}
#: mpiexec -n 4 -ppn 2 (MPICH's Hydra; Intel MPI sets the same), rank 3.
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "7", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
#: srun -N2 -n4, rank 3.
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "b",
}
#: jsrun -n 2 -a 2, rank 3.
LSF = {
    "LSB_JOBID": "77",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [("torchrun", TORCHRUN), ("openmpi", OPEN_MPI), ("pmi", MPICH), ("slurm", SLURM), ("lsf", LSF)],
)
def test_rank_3_of_two_hosts_with_two_workers_finds_its_place(launcher: str, environ: dict[str, str]) -> None:
    place = Topology.from_env(environ)
    assert place.launcher == launcher
    assert (place.rank, place.size) == (3, 4)
    assert (place.local_rank, place.local_size) == (1, 2)
    assert (place.cross_rank, place.cross_size) == (1, 2)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_is_known_by_all_of_its_variables(platform: str) -> None:
    environ = dict(zip(PLATFORMS[platform], ("1", "2", "node-0", "29400"), strict=True))
    found = Topology.from_env(environ)
    assert (found.launcher, found.rank, found.size, found.master) == (platform, 1, 2, "node-0:29400")
    assert Topology.from_env({**environ, **SLURM}).launcher == "slurm"
    for name in environ:
        assert Topology.from_env({**environ, name: ""}) == Topology()


@pytest.mark.parametrize("variables", [HERE.to_env(), TORCHRUN], ids=["ours", "torchrun"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_child_without_its_launcher_s_variables_is_not_a_rank(platform: str, variables: dict[str, str]) -> None:
    kept = {name: value for name, value in variables.items() if not name.startswith(("HOROVOD_", "TORCHELASTIC_"))}
    assert Topology.from_env({**dict.fromkeys(PLATFORMS[platform], "1"), **kept}) == Topology()


def test_started_by_no_one_a_worker_is_alone() -> None:
    assert Topology.from_env({}) == Topology()
    assert (Topology().rank, Topology().size) == (0, 1)


def test_a_topology_survives_the_environment() -> None:
    assert Topology.from_env(HERE.to_env()) == HERE


def test_our_own_launcher_inside_another_one_wins() -> None:
    assert Topology.from_env({**OPEN_MPI, **SLURM, **TORCHRUN, **HERE.to_env()}) == HERE


def test_scripts_of_torchrun_find_its_variables() -> None:
    variables = HERE.to_env()
    assert {name: variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
    }
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.2", "29500")


def test_ranks_that_mpirun_deals_in_turn_find_their_host() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert Topology.from_env(environ).cross_rank == 1


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [
        # Three hosts of two, ranks dealt in turn: each host has the same index for both of its ranks.
        ([0, 0, 0, 1, 1, 1], [(0, 3), (1, 3), (2, 3), (0, 3), (1, 3), (2, 3)]),
        # Two workers on the first host, one on the second.
        ([0, 1, 0], [(0, 2), (0, 1), (1, 2)]),
    ],
)
def test_the_indices_over_the_hosts_follow_from_everybody_s_local_rank(
    local_ranks: list[int], expected: list[tuple[int, int]]
) -> None:
    places = [
        Topology(rank=rank, size=len(local_ranks), local_rank=own, local_size=2).with_cross_indices(local_ranks)
        for rank, own in enumerate(local_ranks)
    ]
    assert [(place.cross_rank, place.cross_size) for place in places] == expected


def test_slurm_s_own_pmi_does_not_hide_slurm() -> None:
    assert Topology.from_env({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"


def test_unequal_nodes_of_slurm_count_the_hosts_that_have_this_local_rank() -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,2", "SLURM_NODEID": "3", "SLURM_PROCID": "6"}
    place = Topology.from_env(environ)
    assert (place.size, place.local_size, place.cross_rank, place.cross_size) == (7, 2, 2, 3)


def test_an_incomplete_launch_names_both_variables() -> None:
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_RANK is set, but OMPI_COMM_WORLD_SIZE is not"):
        Topology.from_env({"OMPI_COMM_WORLD_RANK": "0"})


def test_an_unreadable_node_list_of_slurm_is_shown() -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE='2\*3'"):
        Topology.from_env({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2*3"})


@pytest.mark.parametrize(
    ("index", "count"), [("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")]
)
def test_an_index_outside_its_count_is_refused(index: str, count: str) -> None:
    with pytest.raises(ValueError, match=rf"{index}=2 is not in 0 .. {count}-1, with {count}=2"):
        Topology(**{index: 2, count: 2})


def test_the_secret_is_never_shown() -> None:
    assert HERE.secret.hex() not in repr(HERE)
    assert "secret" not in repr(HERE)
    assert HERE.to_env()[SECRET_VARIABLE] == HERE.secret.hex()


@pytest.mark.parametrize("host", ["node-1", "10.0.0.1", "fe80::1"])
def test_an_address_survives_joining_and_splitting(host: str) -> None:
    assert split_address(join_address(host, 4711)) == (host, "4711")


def test_export_writes_and_removes() -> None:
    environ = {"KEEP": "1", "GO": "1"}
    export({"GO": None, "NEVER_THERE": None, "NEW": "2"}, environ)
    assert environ == {"KEEP": "1", "NEW": "2"}


def test_the_inherited_environment_is_a_copy() -> None:
    inherited_env()["HVD_CLUSTER_TEST_COPY"] = "1"
    assert "HVD_CLUSTER_TEST_COPY" not in inherited_env()


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_real_torchrun_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "place.py"
    script.write_text(
        "from hvd_cluster.topology import Topology\n"
        "place = Topology.from_env()\n"
        "text = f'{place.launcher} {place.local_rank}/{place.local_size}'\n"
        f"open(f'{tmp_path}/{{place.rank}}', 'w').write(text)\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch += [f"--log-dir={tmp_path}/logs", str(script)]
    subprocess.run(launch, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "0").read_text() == "torchrun 0/2"
    assert (tmp_path / "1").read_text() == "torchrun 1/2"
