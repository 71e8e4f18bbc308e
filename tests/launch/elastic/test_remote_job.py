"""Elastic jobs on hosts of their own, reached over ssh; see tests/plugins/hosts.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Machines

HVDRUN = [sys.executable, "-m", "hvd_cluster.launch.cli.main"]
TRAIN = Path(__file__).with_name("scripts") / "train.py"
EPOCHS = 2


def notes(folder: Path) -> list[tuple[int, int, int]]:
    """(step, rank, size) of all workers that there ever were."""
    found = []
    for note in folder.glob("pid.*"):
        step, rank, size = map(int, note.read_text().split()[:3])
        found.append((step, rank, size))
    return found


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cut", "removed"])
def test_a_host_that_goes_is_replaced_by_one_that_comes(
    hosts: Callable[[int], Machines], tmp_path: Path, way: str
) -> None:
    made = hosts(3)
    # Interfaces have other names elsewhere, and one of them leads nowhere.
    made[2].shell("ip link set eth0 down && ip link set eth0 name ib7 && ip link set ib7 up")
    for machine in made.machines:
        machine.shell(
            "ip link add aa0 type veth peer name aa1 && ip addr add 172.17.0.1/16 dev aa0"
            " && ip link set aa0 up && ip link set aa1 up"
        )
    listed = tmp_path / "hosts"
    listed.write_text(f"{made[0].address}:1\n{made[1].address}:1\n")
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    line = [*HVDRUN, "--verbose", "-i", made.key, "-np", "2", "--min-np", "1", "--max-np", "2"]
    line += ["--host-discovery-script", f"cat {listed}", sys.executable, str(TRAIN), str(folder), str(EPOCHS), "1.0"]
    with log.open("wb") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, env=made.environment)
    try:
        wait_for(lambda: any(step >= 3 for step, _, _ in notes(folder)), process, log)
        if way == "cut":
            made[0].cut()  # the host of rank 0, without a word
        listed.write_text(f"{made[1].address}:1\n{made[2].address}:1\n")
        wait_for(lambda: "has 2 workers, 1 of them new" in log.read_text(), process, log)
        (folder / "hurry").touch()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    end = json.loads((folder / "end.json").read_text())
    assert Counter(map(tuple, end["seen"])) == Counter((epoch, s) for epoch in range(EPOCHS) for s in range(64))
    assert end["sizes"][-1] == 2
    assert f"{made[2].address} is reached at {made[2].address} (ib7)" in log.read_text()
    assert [machine.processes() for machine in made.machines[1:]] == [[], []]


def test_a_host_that_is_cut_off_from_the_others_leaves_them_to_the_job(
    hosts: Callable[[int], Machines], tmp_path: Path
) -> None:
    made = hosts(3)
    a, b, c = (machine.address for machine in made.machines)
    made[1].shell(f"ip route add blackhole {a}/32 && ip route add blackhole {c}/32")  # the launcher still gets there
    line = [*HVDRUN, "--verbose", "-i", made.key, "-np", "2", "--min-np", "2", "--max-np", "3"]
    line += ["--host-discovery-script", f"printf '{a}:1\\n{b}:1\\n{c}:1\\n'", "sh", "-c", "hostname -I"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=made.environment)
    assert done.returncode == 0, done.stderr
    assert {text.partition(":")[2].strip() for text in done.stdout.splitlines()} == {a, c}
    assert f"host {b} cannot be used" in done.stderr
    assert f"host {a} cannot be used" not in done.stderr
