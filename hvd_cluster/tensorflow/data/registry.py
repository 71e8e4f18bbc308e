"""The registry of a tf.data service.

Dispatchers and workers register, and training processes look them up. It is a key-value store like the job's, so a
client must first prove that it holds the key.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hvd_cluster.rendezvous.addresses import first_reachable
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.topology import join_address, split_address

logger = logging.getLogger(__name__)

_SHUTDOWN = "shutdown"
#: An unlimited wait is split into waits of this length.
_LONG_S = 3600.0


class ComputeService:
    """The server of the registry; a context manager.

    Args:
        dispatchers: the number of dispatchers.
        workers_per_dispatcher: the number of workers of each dispatcher.
        key: the secret of the registry.
        host: the address to listen on.

    Raises:
        ValueError: a number is less than 1.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes, host: str = "127.0.0.1") -> None:
        if dispatchers < 1 or workers_per_dispatcher < 1:
            raise ValueError(
                f"dispatchers={dispatchers} and workers_per_dispatcher={workers_per_dispatcher} must be at least 1"
            )
        self._server = KeyValueServer(key, host)
        #: The port on which it listens.
        self.port = self._server.port

    def close(self) -> None:
        """Stop; may be called twice."""
        self._server.close()

    def __enter__(self) -> ComputeService:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ComputeClient:
    """A client of a :class:`ComputeService`.

    Dispatchers, workers and training processes have one.

    Args:
        addresses: "host:port" of the service, one for each interface of its host.
        key: its secret.
        workers_per_dispatcher: the number of workers of each dispatcher.
        timeout_s: how long to try to connect.
        verbose: 2 or more logs each registration.
    """

    def __init__(
        self, addresses: Sequence[str], key: bytes, workers_per_dispatcher: int, timeout_s: float, verbose: int = 1
    ) -> None:
        self._addresses = list(addresses)
        self._key = key
        self._workers_per_dispatcher = workers_per_dispatcher
        self._timeout_s = timeout_s
        self._level = logging.INFO if verbose >= 2 else logging.DEBUG

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register a dispatcher at "host:port".

        Raises:
            RuntimeError: another dispatcher was registered before.
        """
        with self._connected() as client:
            first = client.compare_set(f"dispatcher/{dispatcher_id}", b"", dispatcher_address.encode()).decode()
        if first != dispatcher_address:
            raise RuntimeError(
                f"dispatcher {dispatcher_id} of this tf.data service was started before, at {first}, and the workers "
                "stay with it: enter tf_data_service() once, or start the workers again too. For training that is "
                "elastic or starts again, let the workers run the dispatchers: --dispatcher-side compute"
            )
        logger.log(self._level, "tf.data service: dispatcher %d is at %s", dispatcher_id, dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait for a dispatcher and return its address.

        Raises ``TimeoutError`` after ``timeout`` seconds.
        """
        with self._connected() as client:
            return client.get(f"dispatcher/{dispatcher_id}", timeout).decode()

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker by its index among all workers."""
        logger.log(self._level, "tf.data service: worker %d serves dispatcher %d", worker_id, dispatcher_id)
        with self._connected() as client:
            client.set(f"worker/{worker_id}", str(dispatcher_id).encode())

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers of a dispatcher have registered.

        Raises ``TimeoutError`` after ``timeout`` seconds.
        """
        first = dispatcher_id * self._workers_per_dispatcher
        with self._connected() as client:
            client.wait([f"worker/{first + number}" for number in range(self._workers_per_dispatcher)], timeout)

    def shutdown(self) -> None:
        """Let dispatchers and workers exit: the training has ended."""
        with self._connected() as client:
            client.set(_SHUTDOWN, b"1")

    def wait_for_shutdown(self) -> None:
        """Wait until a client calls :meth:`shutdown` or the service is gone."""
        try:
            with self._connected() as client:
                while True:
                    try:
                        client.wait([_SHUTDOWN], _LONG_S)
                    except TimeoutError:
                        continue
                    return
        except ConnectionError as error:
            logger.log(self._level, "tf.data service: %s", error)

    def local_host(self) -> str:
        """The address of this host that reaches the service.

        The other processes can probably reach it too.
        """
        with self._connected() as client:
            return client.local_host

    @contextmanager
    def _connected(self) -> Iterator[KeyValueClient]:
        hosts = [split_address(address) for address in self._addresses]
        port = int(hosts[0][1])
        host = first_reachable([host for host, _ in hosts], port, self._key, self._timeout_s)
        client = KeyValueClient(join_address(host, port), self._key, self._timeout_s)
        try:
            yield client
        finally:
            client.close()
