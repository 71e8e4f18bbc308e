"""The port at which a rank waits for its neighbours while hvd.init() runs: strangers crowd it before they come."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_cluster.engine import world
from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.session import SignedSession
from hvd_cluster.topology import Topology

#: Rank 1 comes when a file "go" is there.
PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
import hvd_cluster.torch as hvd
from hvd_cluster.engine import world

world._MAX_UNKNOWN = 0  # so that rank 1 is pushed out as well, now and then
folder, rank = Path(sys.argv[1]), os.environ["HOROVOD_RANK"]
(folder / f"pid.{rank}.tmp").write_text(str(os.getpid()))
(folder / f"pid.{rank}.tmp").rename(folder / f"pid.{rank}")
while rank == "1" and not (folder / "go").exists():
    time.sleep(0.02)
hvd.init()
print("sum", hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum).tolist())
hvd.shutdown()
"""
#: More than the kernel keeps waiting.
CROWD = 300


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (open, (self.file, "w"))


def port_of(folder: Path, job: subprocess.Popen[str]) -> int:
    """Where rank 0 waits for rank 1."""
    deadline_s = time.monotonic() + 60
    while True:
        assert job.poll() is None
        assert time.monotonic() < deadline_s
        if (folder / "pid.0").exists() and (folder / "pid.1").exists():
            process = psutil.Process(int((folder / "pid.0").read_text()))
            ports = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            if ports:
                ((address, port),) = ports
                assert address == "127.0.0.1"
                return int(port)
        time.sleep(0.02)


@contextlib.contextmanager
def crowd(port: int, messages: list[bytes]) -> Iterator[None]:
    """Strangers, as many as ``CROWD`` at a time, who come and go for as long as this is open."""
    over = threading.Event()

    def come() -> None:
        with contextlib.ExitStack() as strangers:
            for number in range(CROWD):
                sock = strangers.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
                with contextlib.suppress(OSError):  # it waits to be let in
                    sock.send(messages[number % len(messages)])

    def keep_coming() -> None:
        while not over.is_set():
            come()

    thread = threading.Thread(target=keep_coming)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_crowd_of_strangers_during_init_runs_nothing_and_keeps_no_rank_out(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    bomb = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    greeting = bytes(SignedSession(b"a guess", accepts=False).outgoing)
    messages = [b"", b"\xff\x00" * 5000, b"GET / HTTP/1.1\r\n\r\n", bomb, greeting + b"\0" * 40 + bomb]
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", sys.executable),
            "program.py",
            str(tmp_path),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        port = port_of(tmp_path, job)
        # The first in the queue; the crowd fills it.
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, crowd(port, messages):
            time.sleep(0.2)
            (tmp_path / "go").touch()
            with pytest.raises((AuthenticationError, EOFError, OSError)):
                Channel.connect(sock, new_secret(), 20.0)
            time.sleep(1.5)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, output
    assert [line for line in output.splitlines() if "sum" in line].count("[0]<stdout>:sum [3.0, 3.0, 3.0]") == 1
    assert "[1]<stdout>:sum [3.0, 3.0, 3.0]" in output
    assert not (tmp_path / "exploded").exists()


def test_a_rank_whose_parent_hangs_up_calls_again() -> None:
    child = Topology(rank=1, size=2, local_rank=1, local_size=2, secret=new_secret())
    parent = replace(child, rank=0, local_rank=0)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        calling = pool.submit(world._connect, *listener.getsockname(), child, 20.0)
        listener.accept()[0].close()
        links = world._accept(listener, parent, {1}, 20.0, [])
        with contextlib.closing(calling.result()), contextlib.closing(links[1]):
            assert set(links) == {1}
