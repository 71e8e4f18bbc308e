from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

import pytest

from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY, IPV6_ADDRESSES, ReservedPort, keep_alive, listen


def names(sockets: Sequence[socket.socket]) -> tuple[list[str], set[int]]:
    """Where they listen: addresses, and ports."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(one).getsockname() for one in sockets]
    return [name[0] for name in found], {name[1] for name in found}


def test_several_addresses_have_one_port() -> None:
    addresses, ports = names(listen(["127.0.0.1", "127.0.0.2", "127.0.0.1"]))
    assert addresses == ["127.0.0.1", "127.0.0.2"]
    assert len(ports) == 1


@pytest.mark.skipif(not IPV6_ADDRESSES.exists(), reason="this host has no IPv6")
def test_all_interfaces_are_those_of_both_versions_of_ip() -> None:
    addresses, ports = names(listen([ANY]))
    assert addresses == [ANY, "::"]
    assert len(ports) == 1
    secret = new_secret()
    with KeyValueServer(secret, ANY) as server:
        for address in ("127.0.0.1", "[::1]"):
            KeyValueClient(f"{address}:{server.port}", secret).close()
    with KeyValueServer(secret) as server:
        KeyValueClient(f"[::1]:{server.port_at('::1')}", secret).close()


def test_a_port_that_is_taken_on_one_of_them_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    create, taken = socket.create_server, []

    def meddle(address: tuple[str, int], **more: object) -> socket.socket:
        if address[0] == "127.0.0.2" and not taken:
            taken.append(create(address))
        return create(address, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", meddle)
    addresses, (port,) = names(listen(["127.0.0.1", "127.0.0.2"]))
    with taken[0] as other:
        assert port != other.getsockname()[1]
    assert addresses == ["127.0.0.1", "127.0.0.2"]


def test_an_address_that_only_others_know_means_all_interfaces() -> None:
    assert names(listen(["203.0.113.7"]))[0] == names(listen([ANY]))[0]
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", 0)) as other:
        listen(["127.0.0.1"], other.getsockname()[1])


def test_a_store_listens_where_it_is_asked_to_and_nowhere_else() -> None:
    secret = new_secret()
    with KeyValueServer(secret) as server:
        assert server.port_at("127.0.0.1") == server.port
        port = server.port_at("127.0.0.2")
        assert server.port_at("127.0.0.2") == port
        with contextlib.closing(KeyValueClient(f"127.0.0.2:{port}", secret)) as other:
            other.set("key", b"value")
        with contextlib.closing(KeyValueClient(f"127.0.0.1:{server.port}", secret)) as client:
            assert client.get("key") == b"value"
        for number in (port, server.port):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.3", number))
    with pytest.raises(ConnectionError, match="closed"):
        server.port_at("127.0.0.4")
    with KeyValueServer(secret, ANY) as server:
        assert server.port_at("127.0.0.2") == server.port


#: The shortest time after which a common firewall forgets a silent connection: Azure's load balancer.
FORGOTTEN_S = 240


def test_the_kernel_speaks_before_a_firewall_forgets_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 2 * sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < FORGOTTEN_S
        # A network that is away for a moment costs nothing.
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_a_server_with_reuseaddr_can_listen_on_a_reserved_port_and_no_one_else_gets_it() -> None:
    with ReservedPort() as reserved, ReservedPort() as other:
        assert reserved.port != other.port
        with socket.socket() as careless, pytest.raises(OSError, match="in use") as caught:
            careless.bind(("127.0.0.1", reserved.port))
        assert caught.value.errno == errno.EADDRINUSE
        with socket.create_server(("127.0.0.1", reserved.port)) as server:
            socket.create_connection(server.getsockname()).close()
