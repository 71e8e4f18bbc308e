"""A worker's connection to the job's key-value store, and queues in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hvd_cluster.errors import AuthenticationError, StaleWorldError
from hvd_cluster.rendezvous.channel import Channel, HungUpError
from hvd_cluster.rendezvous.protocol import Answer, Command, pack, unpack
from hvd_cluster.rendezvous.sockets import keep_alive
from hvd_cluster.topology import split_address

#: Requests that are safe to repeat if the connection breaks before the answer. A reader of a box must accept a message
#: that was pushed twice.
_REPEATABLE = frozenset([*(Command.SET, Command.GET, Command.WAIT, Command.DELETE, Command.CHECK), Command.PUSH])
#: Seconds that a reconnection may take.
_RECONNECT_S = 10.0
#: How much longer than the request's own timeout the client waits for the server's reply.
_GRACE_S = 10.0
#: The first and the longest interval at which a waiting client calls ``watch``. Each time it repeats its request, and
#: the server looks for all its keys.
_FIRST_WATCH_S, _LAST_WATCH_S = 0.25, 2.0


class KeyValueClient:
    """A connection to the job's key-value store.

    The store is a :class:`~hvd_cluster.rendezvous.server.KeyValueServer`. It handles one request at a time: while a
    thread waits in :meth:`get`, other threads wait too. Threads that wait for different keys need a client each.

    Args:
        address: "host:port" of the server.
        timeout_s: seconds for connecting, and the default timeout of requests.

    Raises:
        ConnectionError: no server answers at ``address``, or it does not know ``secret`` (AuthenticationError).
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float = 30.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        #: Called repeatedly by a thread that waits for keys; an exception that it raises ends the wait.
        self.watch: Callable[[], None] | None = None
        self._secret = secret
        self._lock = threading.Lock()
        self._is_closed = False
        #: A request has been interrupted, and its connection closed: the next one needs another.
        self._is_broken = False
        self._channel = _connect(address, secret, timeout_s)

    @property
    def local_host(self) -> str:
        """The address of this host that reaches the server.

        The other workers can probably reach it too.
        """
        return self._channel.local_host

    def clone(self) -> KeyValueClient:
        """Another connection to the same server."""
        return KeyValueClient(self.address, self._secret, self.timeout_s)

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` and wake the clients that wait for ``key``."""
        self._ask(Command.SET, key.encode(), value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait until a key is set, and return its value.

        Raises ``TimeoutError`` if that takes too long.
        """
        return self.get_many([key], timeout_s)[0]

    def get_many(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Wait until all keys are set, and return their values.

        Raises ``TimeoutError``, which names the missing ones.
        """
        return self._wait_for(Command.GET, keys, timeout_s)

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all keys are set.

        Raises ``TimeoutError``, which names the missing ones.
        """
        self._wait_for(Command.WAIT, keys, timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number at ``key`` (0 when absent) and return the sum."""
        return int(self._ask(Command.ADD, key.encode(), str(amount).encode())[0])

    def append(self, key: str, value: bytes) -> None:
        """Append ``value`` to the bytes at ``key``."""
        self._ask(Command.APPEND, key.encode(), value)

    def push(self, box: str, value: bytes) -> int:
        """Set ``box/N`` to ``value``, after N earlier messages, in one step. Returns N.

        If the connection breaks before the answer, the message may be pushed twice.
        """
        return int(self._ask(Command.PUSH, box.encode(), value)[0])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a key to ``desired`` if its value is ``expected``; return its value now.

        An empty ``expected`` also stands for an absent key.
        """
        return self._ask(Command.SWAP, key.encode(), expected, desired)[0]

    def delete(self, key: str) -> bool:
        """Remove ``key``; returns whether it existed."""
        return self._ask(Command.DELETE, key.encode())[0] == b"1"

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are set."""
        return self._ask(Command.CHECK, *(key.encode() for key in keys))[0] == b"1"

    def num_keys(self) -> int:
        """The number of keys in the store."""
        return int(self._ask(Command.COUNT)[0])

    def close(self) -> None:
        """Close the connection; may be called twice, and from another thread."""
        self._is_closed = True
        self._channel.close()

    def _wait_for(self, command: Command, keys: Sequence[str], timeout_s: float | None) -> list[bytes]:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        watch_s = _FIRST_WATCH_S
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            part_s = left_s if self.watch is None else min(left_s, watch_s)
            watch_s = min(2 * watch_s, _LAST_WATCH_S)
            try:
                part_ms = str(int(part_s * 1000)).encode()
                return self._ask(command, part_ms, *(key.encode() for key in keys), limit_s=part_s)
            except TimeoutError as error:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(f"after {limit_s:g} s {error}") from None
            if self.watch is not None:
                self.watch()

    def _ask(self, *request: bytes, limit_s: float | None = None) -> list[bytes]:
        timeout_s = (self.timeout_s if limit_s is None else limit_s) + _GRACE_S
        with self._lock:
            try:
                if self._is_broken and not self._is_closed:
                    self._reconnect()
                try:
                    answer, *fields = self._exchange(request, timeout_s)
                except (EOFError, OSError):  # a firewall may have forgotten the connection
                    if self._is_closed or request[0] not in _REPEATABLE:
                        raise
                    self._reconnect()
                    answer, *fields = self._exchange(request, timeout_s)
            except (EOFError, OSError) as error:
                raise ConnectionError(
                    f"the rendezvous at {self.address} is gone ({error}): the launcher of this job has ended or died, "
                    "or rank 0 if that serves it"
                ) from error
        if answer == Answer.TIMEOUT:
            missing = ", ".join(field.decode() for field in fields[:5]) + (" ..." if len(fields) > 5 else "")
            raise TimeoutError(f"these keys are still missing from the rendezvous: {missing}")
        if answer == Answer.CLOSED:
            raise StaleWorldError(
                f"{fields[0].decode()} belongs to an earlier world: the job has continued without this process"
            )
        if answer == Answer.REFUSED:
            raise ValueError(f"the rendezvous refused a request: {fields[0].decode()}")
        return fields

    def _exchange(self, request: Sequence[bytes], timeout_s: float) -> list[bytes]:
        try:
            self._channel.settimeout(timeout_s)
            self._channel.send(pack(request))
            return unpack(self._channel.recv())
        except BaseException:  # re-raised; a late reply would be taken for that to the next request
            self._is_broken = True
            self._channel.close()
            raise

    def _reconnect(self) -> None:
        self._channel = _connect(self.address, self._secret, _RECONNECT_S, is_running=True)
        self._is_broken = False
        if self._is_closed:  # in the meantime
            self._channel.close()


def _connect(address: str, secret: bytes, timeout_s: float, *, is_running: bool = False) -> Channel:
    """A connection to the server, which may still be starting.

    If it ``is_running``, a refused connection means that it has ended.
    """
    host, port = split_address(address)
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline_s - time.monotonic())
        try:
            return Channel.open(host, int(port), secret, left_s, keep_alive)
        except HungUpError as error:  # the server has too many new connections
            if time.monotonic() + 0.2 >= deadline_s:
                raise AuthenticationError(f"the rendezvous at {address}: {error}") from None
        except AuthenticationError as error:
            raise AuthenticationError(f"the rendezvous at {address}: {error}") from None
        except TimeoutError as error:
            raise ConnectionError(
                f"no answer from the rendezvous {address} within {timeout_s:g} s: is the port open between the hosts?"
            ) from error
        except OSError as error:
            # The server or this host's network may be starting, and the name of a new pod may not be known yet.
            if is_running or time.monotonic() + 0.2 >= deadline_s:
                raise ConnectionError(f"no answer from the rendezvous at {address}: {error}") from error
        time.sleep(0.1)


class KeyValueMailbox:
    """Reads the messages of a box in order; each box has one reader.

    Args:
        client: the connection; a read keeps it busy, so a reader in its own thread needs its own connection.
        box: the name of the box, to which others :meth:`~KeyValueClient.push`.
    """

    def __init__(self, client: KeyValueClient, box: str) -> None:
        self._client = client
        self._box = box
        self._next = 0

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def next(self, timeout_s: float) -> bytes:
        """The oldest unread message; raises ``TimeoutError`` if none arrives in time."""
        key = f"{self._box}/{self._next}"
        message = self._client.get(key, timeout_s)
        self._client.delete(key)
        self._next += 1
        return message
