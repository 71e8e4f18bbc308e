"""mpirun and srun for real, over two hosts made of namespaces."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, missing

SCRIPT = """
import sys, torch, hvd_cluster.torch as hvd
if sys.argv[1:] == ["mpi4py"]:
    from mpi4py import MPI
for turn in range(2):
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    print(f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}, "
          f"cross {hvd.cross_rank()} of {hvd.cross_size()}: {total:g};", flush=True)
    hvd.shutdown()
"""
EXPECTED = sorted(f"rank {r} of 4, local {r % 2} of 2, cross {r // 2} of 2: 10" for r in range(4)) * 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]


def absent(*programs: str) -> pytest.MarkDecorator:
    """Skips where one of ``programs`` is not installed."""
    names = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(names), reason=f"not installed: {', '.join(names)} (tests/apt.txt)")


def environment(folder: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD", "OMPI", "SLURM"))}
    shared = {"OMP_NUM_THREADS": "1", "HOROVOD_RENDEZVOUS_FOLDER": str(folder / "meet"), "TMPDIR": str(folder)}
    return {**clean, **shared, **more}


def placed(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d[^;]*(?=;)", output))


def mpirun(folder: Path, slots: list[int], *flags: str) -> subprocess.CompletedProcess[str]:
    """The script on hosts of that many slots each; ``flags`` end with the script's arguments."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with Hosts(len(slots), rate_mbit=None) as hosts:
        # mpirun starts its daemons with this in the place of ssh.
        agent = folder / "agent"
        ways = [
            f'[ "$host" = {a} ] && exec {" ".join(hosts.enter(i))} sh -c "$*"' for i, a in enumerate(hosts.addresses)
        ]
        agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", *ways]) + "\n")
        agent.chmod(0o755)
        named = [f"{address}:{count}" for address, count in zip(hosts.addresses, slots, strict=True)]
        command = [
            *(*hosts.enter(0), "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(sum(slots))),
            *("--host", ",".join(named)),
            *("--mca", "plm_rsh_agent", str(agent)),
            *("--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"),
            *("-x", "OMP_NUM_THREADS", "-x", "HOROVOD_RENDEZVOUS_FOLDER"),
            *(*flags[:-1], sys.executable, str(script), flags[-1]),
        ]
        return subprocess.run(
            command, env=environment(folder), capture_output=True, text=True, timeout=110, check=False
        )


@absent("mpirun")
@pytest.mark.parametrize("through", ["a shared folder", "mpi4py"])
def test_a_script_runs_unchanged_under_mpirun_on_two_hosts(tmp_path: Path, through: str) -> None:
    if through == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    done = mpirun(tmp_path, [2, 2], through)
    assert done.returncode == 0, done.stderr
    assert placed(done.stdout) == sorted(EXPECTED)
    if through == "a shared folder":
        assert list((tmp_path / "meet").iterdir()) == [], "the note with the secret is gone"


@absent("mpirun")
@pytest.mark.parametrize(
    ("slots", "flags", "expected"),
    [
        ([2, 2, 2], ("--map-by", "node"), [(r // 3, 2, r % 3, 3) for r in range(6)]),
        ([2, 1], (), [(0, 2, 0, 2), (1, 2, 0, 1), (0, 1, 1, 2)]),
    ],
    ids=["in turn", "unequal"],
)
def test_ranks_find_their_host_among_the_others_however_mpirun_deals_them(
    tmp_path: Path, slots: list[int], flags: tuple[str, ...], expected: list[tuple[int, int, int, int]]
) -> None:
    done = mpirun(tmp_path, slots, *flags, "a shared folder")
    assert done.returncode == 0, done.stderr
    size = sum(slots)
    lines = [
        f"rank {rank} of {size}, local {own} of {here}, cross {cross} of {most}: {size * (size + 1) // 2}"
        for rank, (own, here, cross, most) in enumerate(expected)
    ]
    assert placed(done.stdout) == sorted(lines * 2)


@contextmanager
def slurm(hosts: Hosts, folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm cluster of the hosts; gives the environment of its programs."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    nodes = [f"NodeName=host{i} NodeAddr={address} CPUs=2" for i, address in enumerate(hosts.addresses)]
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"host0({hosts.addresses[0]})",
        "SlurmUser": "root",
        "AuthInfo": f"socket={folder}/munge.socket",
        "ProctrackType": "proctrack/pgid",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": f"{folder}/spool-%n",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": f"{folder}/slurmd-%n.log",
        "SlurmdParameters": "config_overrides",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    (folder / "slurm.conf").write_text("\n".join([*lines, *nodes, "PartitionName=all Nodes=ALL Default=YES"]) + "\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    for name in ("state", "spool-host0", "spool-host1"):
        (folder / name).mkdir()
    env = environment(folder, SLURM_CONF=str(folder / "slurm.conf"))
    munge = [f"--{name}={folder}/munge{suffix}" for name, suffix in {"socket": ".socket", "key-file": ".key"}.items()]
    munge += [f"--{name}={folder}/munged.{name}" for name in ("pid-file", "log-file", "seed-file")]
    with ExitStack() as stack:
        stack.enter_context(daemon(["munged", "--foreground", "--force", *munge], env))
        wait_for(lambda: (folder / "munge.socket").exists())
        stack.enter_context(daemon([*hosts.enter(0), "slurmctld", "-D"], env))
        for host in range(2):
            stack.enter_context(daemon([*hosts.enter(host), "slurmd", "-D", "-N", f"host{host}"], env))
        idle = [*hosts.enter(0), "sinfo", "--noheader", "--states=idle", "--format=%D"]
        wait_for(lambda: subprocess.run(idle, env=env, capture_output=True, check=False).stdout.strip() == b"2")
        yield env


@contextmanager
def daemon(command: list[str], env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(condition: object) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it did not come about within 30 s"
        time.sleep(0.1)


@absent("srun", "slurmctld", "slurmd", "munged")
def test_a_script_runs_unchanged_under_srun_on_two_hosts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Hosts(2, rate_mbit=None) as hosts, slurm(hosts, tmp_path) as env:
        command = [*hosts.enter(0), "srun", "-N2", "-n4", sys.executable, str(script)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert placed(done.stdout) == sorted(EXPECTED)


@absent("sbatch", "slurmctld", "slurmd", "munged")
def test_the_batch_script_of_deploy_runs_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
    with Hosts(2, rate_mbit=None) as hosts, slurm(hosts, tmp_path) as env:
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        # These hosts have two CPUs and no GPU; the script's other requests stand.
        smaller = ["--ntasks-per-node=2", "--cpus-per-task=1", "--gres=none", "--output=job.log"]
        command = [*hosts.enter(0), "sbatch", "--wait", f"--chdir={tmp_path}", *smaller, str(script)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert placed((tmp_path / "job.log").read_text()) == sorted(EXPECTED)
