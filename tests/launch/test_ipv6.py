"""Two hosts that have no IPv4 address except loopback: over ssh, and as other launchers start the ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Machine, Machines

HVDRUN = [sys.executable, "-m", "hvd_cluster.launch.cli.main"]
SCRIPT = """
import os, torch, torch.distributed as dist, hvd_cluster.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1 << 18,), hvd.rank() + 1.0), op=hvd.Sum)
assert total.min() == total.max()
print(f"rank {hvd.rank()} of {hvd.size()}, cross {hvd.cross_rank()} of {hvd.cross_size()}: {total[0]:g};", flush=True)
"""
DDP = """
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # the name of these hosts may mean a loopback address
dist.init_process_group("gloo")
dist.all_reduce(total)
assert total[0] == 3 * dist.get_world_size()
"""
EXPECTED = [f"rank {rank} of 2, cross {rank} of 2: 3" for rank in range(2)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def without_ipv4(made: Machines) -> None:
    for machine in made.machines:
        assert re.findall(r"inet ([0-9.]+)", machine.shell("ip -4 addr show")) == ["127.0.0.1"]


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("launcher", ["one of them", "a third host"])
def test_hvdrun_reaches_hosts_with_only_ipv6_from(
    launcher: str, elastic: bool, hosts: Callable[..., Machines], tmp_path: Path
) -> None:
    made = hosts(2, ipv6=True)
    without_ipv4(made)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + ("" if elastic else DDP))
    number = ["--min-np", "2"] if elastic else []
    line = [*HVDRUN, "-i", made.key, "-np", "2", *number, "-H", made.hosts(1), sys.executable, str(script)]
    line = line if launcher == "a third host" else made[0].command(*line)
    done = subprocess.run(line, env=made.environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank [^;]*(?=;)", done.stdout)) == EXPECTED


def slurm(rank: int, _: Machine) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }


def azureml(rank: int, first: Machine) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": first.address, "MASTER_PORT": "29500"}


@pytest.mark.parametrize("platform", [slurm, azureml])
def test_ranks_on_hosts_with_only_ipv6_meet_under(
    platform: Callable[[int, Machine], dict[str, str]], hosts: Callable[..., Machines], tmp_path: Path
) -> None:
    made = hosts(2, ipv6=True)
    without_ipv4(made)
    shared = {**made.environment, "HOROVOD_RENDEZVOUS_FOLDER": str(tmp_path / "meet")}
    processes = [
        subprocess.Popen(
            machine.command(sys.executable, "-c", SCRIPT),
            env={**shared, **platform(rank, made[0])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(made.machines)
    ]
    ended = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "".join(err for _, err in ended)
    assert sorted(re.findall(r"rank [^;]*(?=;)", "".join(out for out, _ in ended))) == EXPECTED
