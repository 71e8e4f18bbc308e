"""What tasks tell the driver while they run: real sockets, both ends in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvd_cluster.launch.wire.messages import OutputLine, ProgressEvent
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.spark.driver_connection import DriverConnection
from hvd_cluster.spark.message_server import MessageServer
from hvd_cluster.spark.messages import RanksAssigned, TaskLost, TaskStarted, WorkerEnded

LOCAL = ["127.0.0.1"]


@pytest.fixture
def secret() -> bytes:
    return new_secret()


@pytest.fixture
def messages() -> queue.SimpleQueue[Any]:
    return queue.SimpleQueue()


@pytest.fixture
def server(secret: bytes, messages: queue.SimpleQueue[Any]) -> Iterator[MessageServer]:
    with MessageServer(secret, LOCAL[0], messages) as one:
        yield one


def test_messages_of_many_tasks_arrive_whole_and_in_order(
    server: MessageServer, secret: bytes, messages: queue.SimpleQueue[Any]
) -> None:
    def tell(index: int) -> None:
        with DriverConnection(server.addresses(LOCAL), secret) as line:
            line.send(TaskStarted(index, "h"))
            for number in range(200):
                line.send(OutputLine(index, "stdout", f"{number} " + "x" * 5000))

    threads = [threading.Thread(target=tell, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.drain(10)
    heard = [messages.get(timeout=5) for _ in range(4 * 202)]
    for index in range(4):
        lines = [one.text for one in heard if isinstance(one, OutputLine) and one.key == index]
        assert lines == [f"{number} " + "x" * 5000 for number in range(200)]
    assert sorted(one.index for one in heard if isinstance(one, TaskLost)) == [0, 1, 2, 3]
    assert messages.empty()


def test_a_task_that_does_not_hold_the_secret_is_not_heard(
    server: MessageServer, messages: queue.SimpleQueue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with DriverConnection(server.addresses(LOCAL), new_secret()) as line:
        assert not line.connected
        line.send(TaskStarted(0, "h"))
    with contextlib.closing(socket.create_connection((LOCAL[0], server.port))) as junk:
        junk.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert junk.recv(1 << 16) is not None
    server.drain(5)
    assert messages.empty()


def test_without_a_driver_output_goes_to_the_executors_log_and_the_task_continues(
    secret: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(socket.create_server((LOCAL[0], 0))) as unused:
        port = unused.getsockname()[1]
    with DriverConnection([f"127.0.0.1:{port}", "no-such-host.invalid:1"], secret) as line:
        assert not line.connected
        line.send(RanksAssigned(0, 0, "h"))
        line.send(ProgressEvent(0, {"epoch": 1}))
        line.send(OutputLine(3, "stderr", "hello"))
    assert capsys.readouterr().err == "[3]<stderr>:hello\n"


def test_the_second_address_is_taken_when_the_first_does_not_answer(
    server: MessageServer, secret: bytes, messages: queue.SimpleQueue[Any]
) -> None:
    with DriverConnection(["no-such-host.invalid:1", *server.addresses(LOCAL)], secret) as line:
        assert line.connected
        line.send(TaskStarted(7, "h"))
        assert messages.get(timeout=5) == TaskStarted(7, "h")


def test_a_stop_reaches_every_task(server: MessageServer, secret: bytes, messages: queue.SimpleQueue[Any]) -> None:
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(DriverConnection(server.addresses(LOCAL), secret)) for _ in range(3)]
        for index, line in enumerate(lines):
            line.send(TaskStarted(index, "h"))
        for _ in lines:
            messages.get(timeout=5)
        assert not any(line.stop_requested.is_set() for line in lines)
        server.stop_tasks()
        lines.append(stack.enter_context(DriverConnection(server.addresses(LOCAL), secret)))  # late
        assert all(line.stop_requested.wait(5) for line in lines)


def test_a_driver_that_is_gone_stops_its_tasks(secret: bytes, messages: queue.SimpleQueue[Any]) -> None:
    with MessageServer(secret, LOCAL[0], messages) as server:
        line = DriverConnection(server.addresses(LOCAL), secret)
        line.send(TaskStarted(0, "h"))
        messages.get(timeout=5)
    try:
        assert line.stop_requested.wait(10)
    finally:
        line.close()


@pytest.mark.long
def test_a_slow_reader_slows_the_senders_down_instead_of_filling_the_memory(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, messages: queue.SimpleQueue[Any]
) -> None:
    monkeypatch.setattr("hvd_cluster.spark.message_server._MAX_WAITING", 50)
    with MessageServer(secret, LOCAL[0], messages) as server, DriverConnection(server.addresses(LOCAL), secret) as line:
        sent = threading.Event()

        def flood() -> None:
            for _ in range(5000):
                line.send(OutputLine(0, "stdout", "x" * 10_000))
            sent.set()

        thread = threading.Thread(target=flood)
        thread.start()
        time.sleep(0.5)
        assert not sent.is_set()
        heard = 0
        while heard < 5000:
            heard += isinstance(messages.get(timeout=10), OutputLine)
        thread.join()


def test_closing_the_listener_twice_is_fine(secret: bytes, messages: queue.SimpleQueue[Any]) -> None:
    server = MessageServer(secret, LOCAL[0], messages)
    server.close()
    server.close()
    server.stop_tasks()


def test_an_end_carries_the_outcome(server: MessageServer, secret: bytes, messages: queue.SimpleQueue[Any]) -> None:
    from hvd_cluster.launch.outcome import Outcome

    outcome = Outcome(2, "h", exit_code=-9, finished_at=1.0)
    with DriverConnection(server.addresses(LOCAL), secret) as line:
        line.send(WorkerEnded(outcome))
        assert messages.get(timeout=5) == WorkerEnded(outcome)


@pytest.mark.long
def test_a_line_from_which_the_driver_takes_nothing_is_closed_at_once(secret: bytes) -> None:
    with socket.create_server((LOCAL[0], 0)) as server, contextlib.ExitStack() as stack:
        accepted: list[Channel] = []
        driver = threading.Thread(target=lambda: accepted.append(Channel.accept(server.accept()[0], secret)))
        driver.start()
        line = DriverConnection([f"{LOCAL[0]}:{server.getsockname()[1]}"], secret)
        driver.join()
        stack.callback(accepted[0].close)
        time.sleep(0.5)  # its thread is in recv, for up to 60 s
        assert line._channel is not None
        line._channel.settimeout(0.2)
        deadline_s = time.monotonic() + 20
        while line.connected and time.monotonic() < deadline_s:
            line.send(ProgressEvent(0, {"text": "x" * (1 << 20)}))
        assert not line.connected
        began_s = time.monotonic()
        line.close()
        assert time.monotonic() - began_s < 30


def test_a_line_that_is_silent_for_hours_is_kept_alive_from_both_ends(
    server: MessageServer, secret: bytes, messages: queue.SimpleQueue[Any]
) -> None:
    with DriverConnection(server.addresses(LOCAL), secret) as line:
        line.send(TaskStarted(0, "h"))
        messages.get(timeout=5)
        assert line._channel is not None
        for channel in (line._channel, server._channels[0]):
            sock = channel._socket
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 120


def test_a_listener_that_found_no_descriptor_once_still_listens(
    server: MessageServer, secret: bytes, messages: queue.SimpleQueue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    refused = threading.Event()
    handler = _Ring(refused)
    logging.getLogger("hvd_cluster").addHandler(handler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller:
        first_free = os.dup(0)
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
        try:
            caller.connect((LOCAL[0], server.port))
            assert refused.wait(10)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            logging.getLogger("hvd_cluster").removeHandler(handler)
    with DriverConnection(server.addresses(LOCAL), secret) as line:
        line.send(TaskStarted(0, "h"))
        assert messages.get(timeout=5) == TaskStarted(0, "h")


class _Ring(logging.Handler):
    """Sets an event when something is logged."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def emit(self, record: logging.LogRecord) -> None:
        del record
        self._event.set()


def test_the_oldest_of_too_many_unauthenticated_connections_is_closed_and_no_tasks(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, messages: queue.SimpleQueue[Any]
) -> None:
    monkeypatch.setattr("hvd_cluster.spark.message_server._MAX_UNAUTHENTICATED", 2)
    monkeypatch.setattr("hvd_cluster.spark.message_server._PROOF_S", 60.0)
    with MessageServer(secret, LOCAL[0], messages) as server, contextlib.ExitStack() as stack:
        line = stack.enter_context(DriverConnection(server.addresses(LOCAL), secret))
        line.send(TaskStarted(0, "h"))
        assert messages.get(timeout=5) == TaskStarted(0, "h")
        crowd = [stack.enter_context(socket.create_connection((LOCAL[0], server.port), 10)) for _ in range(3)]
        while crowd[0].recv(1 << 16):  # what a server says first, then the end
            pass
        line.send(TaskStarted(1, "h"))
        assert messages.get(timeout=5) == TaskStarted(1, "h")
