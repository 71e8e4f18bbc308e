"""Encrypted conversations: what they carry, who is let in, and that a listener learns nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest

from hvd_cluster.errors import AuthenticationError, LaunchError
from hvd_cluster.rendezvous import tls
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.secret import SECRET_BYTES, certificate_of, new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.session import SignedSession

SECRET = new_secret(encrypted=True)


def deliver(source: SignedSession, target: SignedSession) -> list[bytes]:
    data = bytes(source.outgoing)
    source.outgoing.clear()
    return target.feed(data)


def converse(secret: bytes, make: Callable[[bytes, bool], SignedSession]) -> tuple[list[bytes], bytes]:
    """What arrives of a message, and all that was on the wire."""
    opener, accepter, wire = make(secret, False), make(secret, True), b""
    for _ in range(5):
        wire += bytes(opener.outgoing) + bytes(accepter.outgoing)
        deliver(opener, accepter)
        deliver(accepter, opener)
    opener.seal(b"a message that nobody else may read" * 1000)
    wire += bytes(opener.outgoing)
    return deliver(opener, accepter), wire


def test_messages_arrive_and_none_of_them_is_on_the_wire() -> None:
    def session(secret: bytes, accepts: bool) -> SignedSession:
        return SignedSession(secret, accepts=accepts)

    assert SECRET[SECRET_BYTES:] == certificate_of(SECRET)
    received, wire = converse(SECRET, session)
    assert received == [b"a message that nobody else may read" * 1000]
    assert b"nobody" not in wire
    assert b"hvdc/1" not in wire
    received, wire = converse(SECRET[:SECRET_BYTES], session)  # without a certificate it is signed only
    assert b"nobody" in wire


@pytest.mark.long
def test_threads_that_send_while_one_receives_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = tls.TlsLayer.pending

    def dwell(layer: tls.TlsLayer) -> bytes:
        """What it does; the others get the time to run in between."""
        time.sleep(0.0005)
        return pending(layer)

    monkeypatch.setattr(tls.TlsLayer, "pending", dwell)
    left, right = socket.socketpair()
    ends: list[Channel] = []
    accepting = threading.Thread(target=lambda: ends.append(Channel.accept(right, SECRET)))
    accepting.start()
    ends.append(Channel.connect(left, SECRET))
    accepting.join()
    received: list[list[bytes]] = [[], []]
    failures: list[BaseException] = []
    num_senders, num_messages = 3, 200

    def receive(end: int) -> None:
        try:
            while len(received[end]) < num_senders * num_messages:
                received[end].append(ends[end].recv())
        except (OSError, EOFError, ValueError) as error:
            failures.append(error)
            ends[end].close()

    def send(end: int, sender: int) -> None:
        with contextlib.suppress(OSError):
            for number in range(num_messages):
                ends[end].send(b"%d/%d " % (sender, number) + b"x" * (number % 7) * 700)

    threads = [threading.Thread(target=receive, args=(end,)) for end in range(2)]
    threads += [threading.Thread(target=send, args=(end, sender)) for end in range(2) for sender in range(num_senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for end in ends:
        end.close()
    assert not failures
    for messages in received:
        for sender in range(num_senders):
            own = [m.split()[0] for m in messages if m.startswith(b"%d/" % sender)]
            assert own == [b"%d/%d" % (sender, number) for number in range(num_messages)]


@pytest.mark.long
def test_the_store_serves_encrypted_clients_and_no_others() -> None:
    with KeyValueServer(SECRET) as server:
        address = f"127.0.0.1:{server.port}"
        with contextlib.closing(KeyValueClient(address, SECRET)) as client:
            client.set("key", b"x" * 3_000_000)
            assert client.get("key") == b"x" * 3_000_000
        for other in (SECRET[:SECRET_BYTES], new_secret(encrypted=True), SECRET[:SECRET_BYTES] + new_secret()):
            with pytest.raises(ConnectionError):
                KeyValueClient(address, other, 3.0)


def test_a_client_without_the_certificate_gets_no_further_than_the_handshake() -> None:
    with KeyValueServer(SECRET) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        heard = b""
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock,
            context.wrap_socket(sock) as stranger,
            contextlib.suppress(OSError),  # the refusal comes as an alert of TLS or as the end of the connection
        ):
            heard = stranger.recv(100)
        assert heard == b""


def test_channels_of_two_threads_exchange_large_messages_both_ways() -> None:
    near, far = socket.socketpair()
    back: list[bytes] = []

    def answer() -> None:
        with contextlib.closing(Channel.accept(far, SECRET)) as channel:
            channel.send(channel.recv()[::-1])

    thread = threading.Thread(target=answer)
    thread.start()
    with contextlib.closing(Channel.connect(near, SECRET)) as channel:
        channel.send(b"ab" * 1_000_000)
        back.append(channel.recv())
    thread.join()
    assert back == [b"ba" * 1_000_000]


def test_junk_is_not_tls() -> None:
    with pytest.raises(AuthenticationError, match="does not encrypt its messages with the certificate of this job"):
        SignedSession(SECRET, accepts=True).feed(b"GET / HTTP/1.1\r\n\r\n" * 10)


def carried_over(certificate: bytes, text: bytes) -> bytes:
    """What arrives of ``text`` at the other end of a connection under a certificate."""
    one, other = tls.TlsLayer(certificate, accepts=False), tls.TlsLayer(certificate, accepts=True)
    one.write(text)
    heard = b""
    for _ in range(3):
        heard += other.feed(one.pending())
        one.feed(other.pending())
    return heard


@pytest.mark.processes
def test_openssl_makes_certificates_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> bytes:
        raise ImportError("No module named 'cryptography'")

    monkeypatch.setattr(tls, "_by_package", missing)
    made = tls.new_certificate()
    assert b"PRIVATE KEY" in made
    assert b"BEGIN CERTIFICATE" in made
    assert carried_over(made, b"hello") == b"hello"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="pip install cryptography"):
        tls.new_certificate()


def test_the_clocks_of_the_hosts_need_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Ahead:
            return super().now(tz) + dt.timedelta(days=7)

    monkeypatch.setattr(tls.dt, "datetime", Ahead)
    made = tls._by_package()
    assert carried_over(made, b"hello") == b"hello"
