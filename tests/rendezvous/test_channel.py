"""A channel's first words: whoever is refused hears of it at once."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.session import SignedSession

OURS, THEIRS = b"o" * 32, b"t" * 32


def prove(sock: socket.socket, peer: SignedSession) -> None:
    while data := sock.recv(1 << 16):
        try:
            peer.feed(data)
        finally:  # its own proof, too, where it is the first to see that they differ
            with contextlib.suppress(OSError):  # the accepter has hung up by then, or not
                sock.sendall(peer.outgoing)
            peer.outgoing.clear()
    pytest.fail("the accepter hung up without its proof")


@pytest.mark.parametrize("hello_first", [True, False], ids=["hello_first", "hello_with_proof"])
def test_a_peer_with_another_secret_hears_at_once_that_it_is_refused(hello_first: bool) -> None:
    refused: list[str] = []

    def accept(sock: socket.socket) -> None:
        with pytest.raises(AuthenticationError) as error:
            Channel.accept(sock, OURS, 60)
        refused.append(str(error.value))

    near, far = socket.socketpair()
    with near, far:
        far.settimeout(30)
        peer = SignedSession(THEIRS, accepts=False)
        if hello_first:  # otherwise it arrives together with the proof, as it does where the accepter is slow
            far.sendall(peer.outgoing)
            peer.outgoing.clear()
        accepter = threading.Thread(target=accept, args=(near,))
        accepter.start()
        with pytest.raises(AuthenticationError, match="does not hold the secret of this job"):
            prove(far, peer)
        accepter.join(30)
        assert far.recv(1) == b"", "the accepter did not hang up"
    assert refused == ["the peer does not hold the secret of this job: is it a worker of another job?"]


class Lingering(socket.socket):
    """A socket whose next reader is held up on its way into the kernel, with the number of the descriptor in hand."""

    is_held = False

    def hold_the_next_reader(self) -> tuple[threading.Event, threading.Event]:
        self.is_held, self.has_come, self.may_go_on = True, threading.Event(), threading.Event()
        return self.has_come, self.may_go_on

    def recv(self, *args: Any) -> bytes:
        if self.is_held:
            self.has_come.set()
            assert self.may_go_on.wait(30)
        return super().recv(*args)


def test_a_close_from_another_thread_leaves_the_descriptor_to_a_thread_on_its_way_to_it() -> None:
    """Else the number would be given to the next connection, and the reader wait for what comes there."""
    near, far = socket.socketpair()
    lingering = Lingering(fileno=near.detach())
    opened: list[Channel] = []
    accepter = threading.Thread(target=lambda: opened.append(Channel.accept(far, OURS)))
    accepter.start()
    channel = Channel.connect(lingering, OURS)
    accepter.join(30)
    has_come, may_go_on = lingering.hold_the_next_reader()
    told: list[BaseException] = []

    def read() -> None:
        try:
            channel.recv()
        except (EOFError, OSError) as error:
            told.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert has_come.wait(30)
    channel.close()
    assert lingering.fileno() >= 0
    may_go_on.set()
    reader.join(30)
    assert [type(error) for error in told] == [EOFError]
    assert lingering.fileno() == -1
    channel.close()
    with pytest.raises(OSError, match="closed at this end"):
        channel.recv()
    with pytest.raises(OSError, match="closed at this end"):
        channel.send(b"too late")
    opened[0].close()


def test_a_signal_handler_sends_while_its_own_thread_does() -> None:
    near, far = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(Channel.accept, far, OURS, 60)
        sending, receiving = Channel.connect(near, OURS, 60), accepted.result()
        previous = signal.signal(signal.SIGALRM, lambda *_: sending.send(b"from the handler"))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # the pipe is full by then, and the message on its way

            def receive() -> list[int]:
                time.sleep(0.6)
                return [len(receiving.recv()) for _ in range(3)]

            lengths = pool.submit(receive)
            sending.send(bytes(8 << 20))
            sending.send(b"afterwards")
            assert lengths.result(60) == [8 << 20, len("from the handler"), len("afterwards")]
        finally:
            signal.signal(signal.SIGALRM, previous)
        sending.close()
        receiving.close()
