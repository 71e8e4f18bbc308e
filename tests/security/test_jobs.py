"""A whole job on one host: what it listens on, what strangers can do to it, and where its secret does not appear."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

#: Each rank reduces until a file appears; rank 0 writes the job's secret beside it for the test to search for.
PROGRAM = """
import sys, time
from pathlib import Path
import torch
import hvd_cluster.torch as hvd
from hvd_cluster.engine import basics

folder = Path(sys.argv[1])
hvd.init()
if hvd.rank() == 0:
    (folder / "secret").write_bytes(basics.engine().world.topology.secret)
total, steps = torch.zeros(1), 0
while not hvd.allreduce(torch.tensor([float((folder / "stop").exists())]), op=hvd.Max).item():
    total += hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step")
    steps += 1
    time.sleep(0.001)
assert total.item() == 2 * steps
hvd.broadcast_object({"steps": steps})
print("done", hvd.rank())
hvd.shutdown()
"""


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> object:
        return (open, (self.file, "w"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """An hvdrun of two ranks that goes on until the test writes a file "stop"."""
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    flags = ["--verbose", "--log-level", "TRACE", "--timeline-filename", str(folder / "timeline.json")]
    flags += ["--output-filename", str(folder / "output")]
    command = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, sys.executable, str(tmp_path / "program.py"), str(folder)],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )
    try:
        deadline_s = time.monotonic() + 60
        while not (folder / "secret").exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        yield process, folder
    finally:
        process.kill()
        process.wait()


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def test_strangers_neither_run_code_nor_stall_the_job_and_it_listens_on_the_loopback_only(
    job: tuple[subprocess.Popen[str], Path],
) -> None:
    process, folder = job
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for member in family(process)
        for connection in member.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert {address for address, _ in listening} == {"127.0.0.1"}
    bomb = pickle.dumps(Bomb(str(folder / "exploded")))
    for _, port in listening:
        for message in (bomb, b"\x00" * 8 + bomb, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                sock.sendall(message)
                time.sleep(0.05)
    (folder / "stop").touch()
    assert process.wait(60) == 0, (folder / "log").read_text()
    assert not (folder / "exploded").exists()


def test_the_secret_is_on_no_command_line_and_in_no_file(job: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = job
    command_lines = b"\n".join(" ".join(member.cmdline()).encode() for member in family(process))
    (folder / "stop").touch()
    assert process.wait(60) == 0, (folder / "log").read_text()
    secret = (folder / "secret").read_bytes()
    assert len(secret) == 32
    forms = [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret).encode()[2:-1]]
    places = {"command lines": command_lines}
    places |= {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != "secret"}
    assert {"log", "timeline.json", "stdout", "stderr"} <= {Path(name).name for name in places}
    assert b"done 1" in places[str(folder / "log")]
    assert [name for name, content in places.items() for form in forms if form in content] == []


@pytest.mark.slow
def test_the_secret_is_in_nothing_that_a_fit_keeps(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    program = f"""
import pandas, torch
from pathlib import Path
from hvd_cluster.estimators import TorchEstimator

def loss(answer, wanted):
    from hvd_cluster.engine import basics
    if basics.is_initialized():
        Path({str(tmp_path / "secret")!r}).write_bytes(basics.engine().world.topology.secret)
    return torch.nn.functional.mse_loss(answer, wanted)

net = torch.nn.Linear(1, 1)
df = pandas.DataFrame({{"x": [[i / 40] for i in range(40)], "y": [i / 40 for i in range(40)]}})
estimator = TorchEstimator(
    model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0001), loss=loss, feature_cols=["x"], label_cols=["y"],
    batch_size=10, epochs=2, num_proc=2, store={str(tmp_path / "store")!r},
)
model = estimator.fit(df)
model.write().overwrite().save({str(tmp_path / "model")!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    secret = (tmp_path / "secret").read_bytes()
    forms = [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")]
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "secret"]
    assert files
    places = {str(file): file.read_bytes() for file in files} | {"output": done.stdout + done.stderr}
    assert [name for name, content in places.items() for form in forms if form in content] == []
