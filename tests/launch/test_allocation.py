"""The environments are those that the manuals of Slurm (sbatch) and LSF (environment variables) describe."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cluster.launch.allocation import Allocation, expand_nodes, find_allocation
from hvd_cluster.launch.hosts import Host

SBATCH_TWO_NODES_FOUR_TASKS = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_CPUS_ON_NODE": "32",
}
SBATCH_NODES_WITH_GPUS_AND_NO_TASKS = {
    "SLURM_JOB_ID": "4712",
    "SLURM_JOB_NODELIST": "node1,node3",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}
BSUB_LSF = {
    "LSB_JOBID": "815",
    "LSB_HOSTS": "a03 a03 a07 a07 a07",
    "LSB_MCPU_HOSTS": "a03 2 a07 3 ",
    "LSB_DJOB_NUMPROC": "5",
}
BSUB_WITH_A_BATCH_NODE = {"LSB_JOBID": "816", "LSB_MCPU_HOSTS": "batch5 1 d31n01 42 d31n02 42 "}


@pytest.mark.parametrize(
    ("environ", "system", "hosts"),
    [
        (SBATCH_TWO_NODES_FOUR_TASKS, "Slurm", [Host("gpu07", 4), Host("gpu08", 4)]),
        (SBATCH_NODES_WITH_GPUS_AND_NO_TASKS, "Slurm", [Host("node1", 8), Host("node3", 8)]),
        (BSUB_LSF, "LSF", [Host("a03", 2), Host("a07", 3)]),
        (BSUB_WITH_A_BATCH_NODE, "LSF", [Host("d31n01", 42), Host("d31n02", 42)]),
    ],
)
def test_the_hosts_of_a_batch_system_are_found(environ: dict[str, str], system: str, hosts: list[Host]) -> None:
    assert find_allocation(environ) == Allocation(system, hosts)


def test_lsf_s_file_of_slots_says_more_than_its_variables(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("a03\na03\na09\n")
    environ = {**BSUB_LSF, "LSB_DJOB_HOSTFILE": str(file)}
    assert find_allocation(environ) == Allocation("LSF", [Host("a03", 2), Host("a09", 1)])


def test_there_is_no_allocation_outside_of_a_batch_system() -> None:
    assert find_allocation({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a[1-3,07],b", ["a1", "a2", "a3", "a07", "b"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("tux[1]-ib,cn-0001", ["tux1-ib", "cn-0001"]),
    ],
)
def test_slurm_s_lists_of_nodes_are_expanded(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(("text", "slots"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4, 4, 4, 4])])
def test_slurm_s_counts_are_expanded(text: str, slots: list[int]) -> None:
    found = find_allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-4]", "SLURM_TASKS_PER_NODE": text})
    assert found is not None
    assert [host.slots for host in found.hosts] == slots


@pytest.mark.parametrize("environ", [{"SLURM_JOB_NODELIST": "a[1-"}, {"SLURM_TASKS_PER_NODE": "two"}])
def test_variables_that_cannot_be_read_are_named(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(environ))}=.* cannot be parsed"):
        find_allocation({**SBATCH_TWO_NODES_FOUR_TASKS, **environ})


def test_counts_that_do_not_fit_the_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit 2 nodes"):
        find_allocation({**SBATCH_TWO_NODES_FOUR_TASKS, "SLURM_TASKS_PER_NODE": "4,4,4"})
