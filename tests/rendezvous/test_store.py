"""The job's key-value store over real sockets, and as a torch store under a real process group."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from crowded import crowded_port

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous import addresses as host_addresses
from hvd_cluster.rendezvous.addresses import first_reachable
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.torch_store import AuthenticatedStore

SECRET = new_secret()


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    with KeyValueServer(SECRET) as server:
        yield server


@pytest.fixture
def client(server: KeyValueServer) -> Iterator[KeyValueClient]:
    client = KeyValueClient(f"127.0.0.1:{server.port}", SECRET)
    yield client
    client.close()


def test_values_numbers_and_swaps(client: KeyValueClient) -> None:
    client.set("a", b"\x00\xff")
    assert client.get("a") == b"\x00\xff"
    assert (client.add("n", 2), client.add("n", -5)) == (2, -3)
    client.append("log", b"1")
    client.append("log", b"2")
    assert client.get_many(["log", "a"]) == [b"12", b"\x00\xff"]
    assert client.compare_set("lock", b"", b"me") == b"me"
    assert client.compare_set("lock", b"", b"you") == b"me"
    assert client.compare_set("lock", b"me", b"you") == b"you"
    assert client.compare_set("nothing", b"me", b"you") == b"me"
    assert client.check(["a", "n"])
    assert not client.check(["a", "nothing"])
    assert client.delete("a")
    assert not client.delete("a")
    assert client.num_keys() == 3


def test_a_reader_waits_until_the_key_is_set(server: KeyValueServer, client: KeyValueClient) -> None:
    def set_later() -> None:
        other = client.clone()
        time.sleep(0.1)
        other.set("late", b"here")
        other.close()

    thread = threading.Thread(target=set_later)
    thread.start()
    assert client.get("late", timeout_s=10) == b"here"
    thread.join()


@pytest.mark.long
def test_a_watched_reader_looks_up_and_gives_up_when_the_watch_says_so(client: KeyValueClient) -> None:
    looks = []

    def watch() -> None:
        looks.append(time.monotonic())
        if len(looks) == 2:
            raise InterruptedError("a rank is gone")

    client.watch = watch
    start_s = time.monotonic()
    with pytest.raises(InterruptedError, match="a rank is gone"):
        client.get("never", timeout_s=60)
    assert time.monotonic() - start_s < 10
    client.set("here", b"1")
    assert client.get("here", timeout_s=60) == b"1", "the connection has no answer too many"
    with pytest.raises(TimeoutError, match=r"after 0\.6 s these keys are still missing from the rendezvous: never$"):
        client.get("never", timeout_s=0.6)
    assert len(looks) > 2


def test_a_reader_whose_time_passes_is_told_the_missing_keys(client: KeyValueClient) -> None:
    client.set("there", b"")
    with pytest.raises(TimeoutError, match=r"missing from the rendezvous: absent$"):
        client.get_many(["there", "absent"], timeout_s=0.05)
    assert client.get("there") == b""  # the connection still works


def test_a_client_without_the_secret_is_refused_and_others_are_served_on(
    server: KeyValueServer, client: KeyValueClient
) -> None:
    with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1"):
        KeyValueClient(f"127.0.0.1:{server.port}", new_secret(), timeout_s=5)
    client.set("still", b"alive")
    assert client.get("still") == b"alive"


def test_junk_and_silent_connections_do_not_disturb_the_server(server: KeyValueServer, client: KeyValueClient) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port)) as junk,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        junk.sendall(b"\x80\x04junk" * 1000)
        client.set("k", b"v")
        assert client.get("k") == b"v"


@pytest.mark.long
def test_a_stranger_that_gives_way_while_it_speaks_does_not_end_the_server(
    server: KeyValueServer, client: KeyValueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_cluster.rendezvous.server._MAX_UNAUTHENTICATED", 4)
    large = b"x" * 50_000_000
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    client.num_keys()  # all of them are in
    busy = threading.Thread(target=client.set, args=("large", large))
    busy.start()
    deadline_s = time.monotonic() + 20
    while busy.is_alive() and time.monotonic() < deadline_s:
        # In one round of the busy server a new one comes, and the oldest, which gives way for it, speaks.
        strangers.append(socket.create_connection(("127.0.0.1", server.port)))
        for stranger in strangers[-5:-1]:
            with contextlib.suppress(OSError):
                stranger.send(b"h")
        time.sleep(0.005)
    busy.join(20)
    assert client.get("large") == large
    for stranger in strangers:
        stranger.close()


@pytest.mark.long
def test_a_stranger_that_sends_a_byte_now_and_then_is_dropped_in_time() -> None:
    near, far = socket.socketpair()

    def drip() -> None:
        with contextlib.suppress(OSError):
            for byte in b"hvdc/1\r\n" + b"c" * 64:
                near.send(bytes([byte]))
                time.sleep(0.2)

    slow = threading.Thread(target=drip)
    slow.start()
    began_s = time.monotonic()
    with pytest.raises(AuthenticationError, match=r"within 0\.5 s"):
        Channel.accept(far, SECRET, timeout_s=0.5)
    took_s = time.monotonic() - began_s
    far.close()
    slow.join()
    near.close()
    assert took_s < 5


def test_the_end_of_the_server_is_an_error_that_says_so(server: KeyValueServer, client: KeyValueClient) -> None:
    server.close()
    with pytest.raises(ConnectionError, match="is gone"):
        client.get("k")


def test_an_address_where_no_one_listens_is_named() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=address):
            KeyValueClient(address, SECRET, timeout_s=0.3)


def cut(client: KeyValueClient) -> None:
    """As a firewall does that has forgotten the connection."""
    client._channel._socket.shutdown(socket.SHUT_RDWR)


def test_a_connection_that_was_cut_off_is_made_again(server: KeyValueServer, client: KeyValueClient) -> None:
    client.set("here", b"1")
    cut(client)
    assert client.push("box", b"message") == 0
    cut(client)
    assert client.get("box/0") == b"message"
    told: list[bytes] = []
    reader = threading.Thread(target=lambda: told.append(client.get("later", 30)))
    reader.start()
    while not server._table._waiting:
        time.sleep(0.01)
    cut(client)
    other = client.clone()
    other.set("later", b"x")
    reader.join()
    assert told == [b"x"]
    cut(client)
    with pytest.raises(ConnectionError, match="is gone"):
        client.add("sum", 1)  # nobody knows whether it was added
    other.close()


def test_a_client_that_is_closed_while_it_waits_does_not_connect_again(
    server: KeyValueServer, client: KeyValueClient
) -> None:
    errors: list[str] = []

    def wait() -> None:
        try:
            client.get("never", 600)
        except ConnectionError as error:
            errors.append(str(error))

    reader = threading.Thread(target=wait)
    reader.start()
    while not server._table._waiting:
        time.sleep(0.01)
    client.close()
    reader.join()
    assert len(errors) == 1


def test_both_ends_keep_a_silent_connection_alive(server: KeyValueServer, client: KeyValueClient) -> None:
    client.set("here", b"1")
    (link,) = server._links
    for sock in (client._channel._socket, link._socket):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 240


def test_a_client_that_a_crowd_has_pushed_out_calls_again() -> None:
    with crowded_port(SECRET) as port:
        KeyValueClient(f"127.0.0.1:{port}", SECRET).close()


#: Linux connects no TCP socket to everybody ("Network is unreachable").
NO_WAY = "255.255.255.255"


def test_an_address_to_which_no_way_leads_is_named() -> None:
    with pytest.raises(ConnectionError, match=f"{NO_WAY}:9: .*unreachable"):
        KeyValueClient(f"{NO_WAY}:9", SECRET, timeout_s=0.3)


def test_an_address_to_which_no_way_leads_does_not_hide_one_that_answers(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_addresses, "_ATTEMPT_S", 0.3)
    assert first_reachable([NO_WAY, "127.0.0.1"], server.port, SECRET, 30.0) == "127.0.0.1"


@pytest.mark.parametrize("addresses", [[], ["127.0.0.1"]])
def test_a_host_without_an_address_for_others_is_named(addresses: list[str]) -> None:
    with pytest.raises(ConnectionError, match="no address except loopback"):
        first_reachable(addresses, 9, SECRET, 0.3)


def test_a_network_that_comes_up_late_is_waited_for(server: KeyValueServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, tries = socket.create_connection, []

    def late(address: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(address)
        return connect((NO_WAY, 9) if len(tries) < 3 else address, timeout=timeout)

    monkeypatch.setattr(socket, "create_connection", late)
    KeyValueClient(f"127.0.0.1:{server.port}", SECRET, timeout_s=30.0).close()
    assert len(tries) == 3


def test_a_channel_carries_messages_from_many_threads() -> None:
    left, right = socket.socketpair()
    ends: list[Channel] = []
    thread = threading.Thread(target=lambda: ends.append(Channel.accept(right, SECRET)))
    thread.start()
    near = Channel.connect(left, SECRET)
    thread.join()
    far = ends[0]
    senders = [threading.Thread(target=near.send, args=(bytes([i]) * 10_000,)) for i in range(8)]
    for sender in senders:
        sender.start()
    assert sorted(far.recv()[0] for _ in senders) == list(range(8))
    for sender in senders:
        sender.join()
    near.close()
    with pytest.raises(EOFError):
        far.recv()
    far.close()


def test_a_gloo_process_group_works_on_the_authenticated_store(server: KeyValueServer) -> None:
    clients = [KeyValueClient(f"127.0.0.1:{server.port}", SECRET) for _ in range(2)]
    sums: dict[int, torch.Tensor] = {}

    def work(rank: int) -> None:
        store = AuthenticatedStore(clients[rank], "pg/")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = dist.ProcessGroupGloo(store, rank, 2, options)
        tensor = torch.full((3,), float(rank + 1))
        group.allreduce([tensor]).wait()
        sums[rank] = tensor

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert {rank: tensor.tolist() for rank, tensor in sums.items()} == {0: [3.0] * 3, 1: [3.0] * 3}
    assert not dist.is_initialized()


def test_torchs_prefix_store_reaches_all_of_the_authenticated_one(server: KeyValueServer) -> None:
    client = KeyValueClient(f"127.0.0.1:{server.port}", SECRET)
    own = AuthenticatedStore(client, "pg/")
    assert own.timeout == timedelta(seconds=client.timeout_s)
    store = dist.PrefixStore("mine", own)
    store.set("a", "1")
    copy = store.clone()
    assert copy.get("a") == b"1"
    assert store.num_keys() == 1
    assert store.delete_key("a")
    assert not store.delete_key("a")
    store.set_timeout(timedelta(seconds=0.5))
    begun_s = time.monotonic()
    for ask in (lambda: store.get("never"), lambda: store.multi_get(["never"]), lambda: store.wait(["never"])):
        with pytest.raises(TimeoutError):
            ask()
    assert time.monotonic() - begun_s < 10
    client.close()


@pytest.mark.long
def test_several_threads_may_close_a_server_at_once() -> None:
    for _ in range(200):
        server = KeyValueServer(SECRET)
        gate = threading.Barrier(4)
        failures: list[OSError] = []

        def close(
            server: KeyValueServer = server, gate: threading.Barrier = gate, failures: list[OSError] = failures
        ) -> None:
            gate.wait()
            try:
                server.close()
                server.close_keys("late/")
            except OSError as error:
                failures.append(error)

        closers = [threading.Thread(target=close) for _ in range(4)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        assert not failures
