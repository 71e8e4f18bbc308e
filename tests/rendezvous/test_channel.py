"""A channel's first words: whoever is refused hears of it at once."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.session import Session

OURS, THEIRS = b"o" * 32, b"t" * 32


def prove(sock: socket.socket, peer: Session) -> None:
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
        peer = Session(THEIRS, accepts=False)
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
