"""A worker's connection to its driver, in a process of its own whose output is captured."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys

import pytest

from hvd_cluster.ray.messages import CallFinished, OutputLines
from hvd_cluster.rendezvous.channel import Channel

SECRET = b"s" * 32
WORKER = """\
import os, sys, time
from hvd_cluster.ray.driver_connection import DriverConnection
from hvd_cluster.ray.messages import CallFinished
line = DriverConnection(b"s" * 32, "127.0.0.1")
print(line.port, flush=True)
sys.stdin.readline()
print(":actor_name:Somebody")
print("from Python")
os.write(2, b"past Python\\n")
line.catch_up()
line.send(CallFinished(7))
sys.stdin.readline()
for number in range(20):  # the system takes a message or two before it notices
    print("after the driver's end", flush=True)
    line.catch_up()
    time.sleep(0.02)
"""


def test_the_driver_connects_among_other_peers_and_gets_every_line_before_the_end_of_the_call() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    address = ("127.0.0.1", int(worker.stdout.readline()))
    silent = [socket.create_connection(address) for _ in range(3)]  # they say nothing, and keep nobody out
    loud = socket.create_connection(address)
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with socket.create_connection(address) as sock:
        channel = Channel.connect(sock, SECRET)
        channel.send(pickle.dumps("the driver"))
        assert pickle.loads(channel.recv()) == OutputLines("stdout", [])
        worker.stdin.write("go\n")
        worker.stdin.flush()
        heard = [pickle.loads(channel.recv()) for _ in range(3)]
        assert heard[-1] == CallFinished(7)
        assert sorted((lines.stream, *lines.texts) for lines in heard[:-1]) == [
            ("stderr", "past Python"),
            ("stdout", "from Python"),
        ]
        channel.close()
    for stranger in (*silent, loud):
        stranger.close()
    rest, _ = worker.communicate("end\n", timeout=30)
    assert worker.returncode == 0
    assert "after the driver's end" in rest  # to where it went before there was a driver


TALKER = """\
import sys, threading, time
from hvd_cluster.ray.driver_connection import DriverConnection
line = DriverConnection(b"s" * 32, "127.0.0.1")
print(line.port, flush=True)
until = threading.Thread(target=sys.stdin.readline)
until.start()
while until.is_alive():
    print("still here", flush=True)
    time.sleep(0.02)
"""


def test_a_driver_that_calls_again_hears_on_and_its_first_connection_ends() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    address = ("127.0.0.1", int(worker.stdout.readline()))
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        channels = []
        for sock in (first, second):
            channel = Channel.connect(sock, SECRET)
            channel.send(pickle.dumps("the driver"))
            channel.settimeout(30)
            while not pickle.loads(channel.recv()).texts:
                pass
            channels.append(channel)
        with pytest.raises(EOFError):
            list(iter(channels[0].recv, b""))
        assert "still here" in pickle.loads(channels[1].recv()).texts
        for channel in channels:
            channel.close()
    worker.communicate("end\n", timeout=30)
    assert worker.returncode == 0
