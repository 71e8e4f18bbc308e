"""Jobs over ssh on hosts of their own: network namespaces with an sshd in each; see tests/plugins/hosts.py."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hosts import Machines

from hvd_cluster.rendezvous.sockets import DEAD_HOST_S

HVDRUN = [sys.executable, "-m", "hvd_cluster.launch.cli.main"]
MakeHosts = Callable[[int], Machines]

ALLREDUCE = """\
import sys
import torch
import hvd_cluster.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum)
print("sum", total[0].item(), "of", hvd.size(), "local", hvd.local_rank(), hvd.local_size(), "cross", hvd.cross_rank())
"""


def hvdrun(made: Machines, *arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    line = [*HVDRUN, "-i", made.key, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False, env=made.environment)


def test_a_command_runs_on_two_hosts_over_ssh(hosts: MakeHosts) -> None:
    made = hosts(2)
    line = "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_CROSS_RANK $HOROVOD_GLOO_IFACE $(hostname -I)"
    result = hvdrun(made, "-np", "3", "-H", made.hosts(2), "sh", "-c", line)
    assert result.returncode == 0, result.stderr
    a, b = made[0].address, made[1].address
    assert [line.rstrip() for line in sorted(result.stdout.splitlines())] == [
        f"[0]<stdout>:0/3 0 0 eth0 {a}",
        f"[1]<stdout>:1/3 1 0 eth0 {a}",
        f"[2]<stdout>:2/3 0 1 eth0 {b}",
    ]
    assert [machine.processes() for machine in made.machines] == [[], []]


def test_a_host_that_cannot_be_reached_is_named_with_what_ssh_says(hosts: MakeHosts) -> None:
    made = hosts(1)
    absent = made.address.rpartition(".")[0] + ".99"
    result = hvdrun(made, "-np", "2", "--start-timeout", "3", "-H", f"{made[0].address}:1,{absent}:1", "true")
    assert result.returncode == 2
    assert "could not connect to some hosts via ssh" in result.stderr
    assert f"  {absent}: ssh could not connect" in result.stderr
    assert "No route to host" in result.stderr or "timed out" in result.stderr
    assert f"  {made[0].address}:" not in result.stderr
    assert made[0].processes() == []


def test_a_host_without_the_folder_of_the_launcher_is_refused(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(1)
    folder = tmp_path / "work" / "here only"
    folder.mkdir(parents=True)
    made[0].shell(f"mount -t tmpfs tmpfs '{folder.parent}'")
    line = [*HVDRUN, "-i", made.key, "-np", "1", "-H", made.hosts(1), "true"]
    result = subprocess.run(line, capture_output=True, text=True, check=False, env=made.environment, cwd=folder)
    assert result.returncode == 2
    assert f"cannot change to {folder}, the launcher's working directory, on {made[0].address}" in result.stderr


def test_the_first_failing_rank_ends_the_other_hosts_and_speaks_last(hosts: MakeHosts) -> None:
    made = hosts(2)
    began = time.monotonic()
    script = 'if [ $RANK = 1 ]; then echo "what went wrong"; exit 7; fi; sleep 300'
    result = hvdrun(made, "-np", "2", "-H", made.hosts(1), "sh", "-c", script)
    assert time.monotonic() - began < 20
    assert result.returncode == 7
    assert f"Rank 1 on host {made[1].address} exited with code 7." in result.stderr
    assert result.stderr.endswith("Last output of rank 1:\n  what went wrong\n")
    assert [machine.processes() for machine in made.machines] == [[], []]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_launcher_on_any_host_and_none_shows_the_secret(hosts: MakeHosts, number: int) -> None:
    made = hosts(2)
    script = 'echo "secret $_HOROVOD_SECRET_KEY"; sleep 300 & wait'
    launcher = subprocess.Popen(
        [*HVDRUN, "-i", made.key, "-np", "2", "-H", made.hosts(1), "bash", "-c", script],
        env=made.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        secrets = {launcher.stdout.readline().split()[-1] for _ in range(2)}
        (secret,) = secrets
        assert len(secret) == 64
        assert all("sleep 300" in " ".join(machine.processes()) for machine in made.machines)
        seen = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
        assert not any(secret.encode() in line for line in seen)
        launcher.send_signal(number)
        launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 15
    while any(machine.processes() for machine in made.machines):
        assert time.monotonic() < deadline, [machine.processes() for machine in made.machines]
        time.sleep(0.1)


@pytest.mark.slow
def test_workers_on_hosts_of_equal_names_without_common_shared_memory_reduce(hosts: MakeHosts) -> None:
    made = hosts(2)
    result = hvdrun(made, "-np", "4", "-H", made.hosts(2), sys.executable, "-c", ALLREDUCE)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}]<stdout>:sum 10.0 of 4 local {rank % 2} 2 cross {rank // 2}" for rank in range(4)
    ]


@pytest.mark.slow
def test_the_launcher_s_own_host_may_take_part(hosts: MakeHosts) -> None:
    made = hosts(1)
    where = f"localhost:1,{made[0].address}:1"
    result = hvdrun(made, "-np", "2", "-H", where, sys.executable, "-c", ALLREDUCE)
    assert result.returncode == 0, result.stderr
    assert "[0]<stdout>:sum 3.0 of 2 local 0 1 cross 0" in result.stdout
    assert "[1]<stdout>:sum 3.0 of 2 local 0 1 cross 1" in result.stdout


def test_an_interface_that_does_not_route_is_passed_over(hosts: MakeHosts) -> None:
    made = hosts(2)
    # On both hosts an interface that leads nowhere, with equal addresses, as Docker's bridge has everywhere.
    for machine in made.machines:
        machine.shell(
            "ip link add aa0 type veth peer name aa1 && ip addr add 172.17.0.1/16 dev aa0"
            " && ip link set aa0 up && ip link set aa1 up"
        )
    made[1].shell("ip link set eth0 down && ip link set eth0 name ib7 && ip link set ib7 up")
    show = "echo $HOROVOD_GLOO_IFACE"
    result = hvdrun(made, "-np", "2", "-H", made.hosts(1), "sh", "-c", show)
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:eth0", "[1]<stdout>:ib7"], result.stderr
    refused = hvdrun(made, "-np", "2", "-H", made.hosts(1), "--network-interfaces", "aa0", "sh", "-c", show)
    assert refused.returncode == 2
    assert "these hosts have no address that all other hosts reach" in refused.stderr
    assert "--network-interfaces" in refused.stderr


def test_a_function_runs_on_other_hosts_and_returns_its_values(hosts: MakeHosts, tmp_path: Path) -> None:
    made = hosts(2)
    script = tmp_path / "script.py"
    script.write_text(
        "import hvd_cluster\n"
        "def fn(base):\n"
        "    import os\n"
        "    print('handshake')\n"
        "    return base + int(os.environ['HOROVOD_RANK'])\n"
        f"print(hvd_cluster.run(fn, (10,), num_proc=3, hosts='{made.hosts(2)}', ssh_identity_file='{made.key}',"
        " output_filename='out'))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=made.environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[10, 11, 12]", done.stderr
    assert (tmp_path / "out/rank.2/stdout").read_text() == "handshake\n"


LISTENING = """\
import psutil, sys, time
from pathlib import Path
import torch
import hvd_cluster.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1000))
found = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print("listening", *sorted({laddr.ip for laddr in found if laddr.port != 22}), flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--network-interfaces", "eth0"]], ids=["probed", "named"])
def test_while_a_job_runs_it_listens_on_no_address_that_it_does_not_use(
    hosts: MakeHosts, flags: list[str], tmp_path: Path
) -> None:
    made = hosts(2)
    stop = str(tmp_path / "stop")
    line = [*HVDRUN, "-i", made.key, "-np", "2", "-H", made.hosts(1), *flags, sys.executable, "-c", LISTENING, stop]
    launcher = subprocess.Popen(line, env=made.environment, stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        said = sorted(launcher.stdout.readline() for _ in range(2))
        assert said == [f"[{rank}]<stdout>:listening {made[rank].address}\n" for rank in range(2)]
        ours = psutil.Process(launcher.pid).net_connections("tcp")
        assert {c.laddr.ip for c in ours if c.status == psutil.CONN_LISTEN} == {"127.0.0.1", made.address}
        Path(stop).touch()
        assert launcher.wait(60) == 0
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pager", "stopped"])
def test_a_launcher_that_takes_no_output_for_a_while_loses_no_host_and_no_line(
    hosts: MakeHosts, how: str, tmp_path: Path
) -> None:
    made = hosts(2)
    errors = tmp_path / "stderr"
    flood = "i=0; while [ $i -lt 40000 ]; do i=$((i + 1)); echo line $i; done"
    line = [*HVDRUN, "-i", made.key, "-np", "2", "-H", made.hosts(1), "sh", "-c", flood]
    with errors.open("w") as stderr:
        launcher = subprocess.Popen(line, env=made.environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert launcher.stdout is not None
        said = [launcher.stdout.readline()]
        if how == "stopped":
            launcher.send_signal(signal.SIGSTOP)
        time.sleep(DEAD_HOST_S + 5)
        launcher.send_signal(signal.SIGCONT)
        said += launcher.stdout.readlines()
        launcher.wait(60)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, errors.read_text()
    for rank in range(2):
        mine = [text for text in said if text.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}]<stdout>:line {i}\n" for i in range(1, 40001)]


@pytest.mark.slow
def test_a_job_over_four_hosts_takes_them_in_their_order(hosts: MakeHosts) -> None:
    made = hosts(4)
    result = hvdrun(made, "-np", "8", "-H", made.hosts(2), sys.executable, "-c", ALLREDUCE)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}]<stdout>:sum 36.0 of 8 local {rank % 2} 2 cross {rank // 2}" for rank in range(8)
    ]


@pytest.mark.slow
def test_a_host_that_is_lost_ends_the_job(hosts: MakeHosts) -> None:
    made = hosts(2)
    script = "import time, torch\nimport hvd_cluster.torch as hvd\nhvd.init()\nprint('up', flush=True)\n"
    script += "while True:\n    hvd.allreduce(torch.ones(10), name='x')\n    time.sleep(0.01)\n"
    launcher = subprocess.Popen(
        [*HVDRUN, "-i", made.key, "-np", "2", "-H", made.hosts(1), sys.executable, "-u", "-c", script],
        env=made.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        for _ in range(2):
            launcher.stdout.readline()
        made[1].cut()
        began = time.monotonic()
        _, errors = launcher.communicate(timeout=60)
        assert time.monotonic() - began < 40
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 1
    assert "ank 1" in errors
    assert made[0].processes() == []
    deadline = time.monotonic() + 30
    while made[1].processes():  # its agent notices by itself that the launcher's host is gone
        assert time.monotonic() < deadline, made[1].processes()
        time.sleep(0.2)
