"""The tf.data service in two calls.

The workers of one job prepare the training data of another job. ``hvdrun -np 4 python -m
hvd_cluster.tensorflow.data.compute_worker service.json`` starts the workers; the training job reads the file with
:meth:`TfDataServiceConfig.read` and passes it to :func:`send_to_data_service`.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_cluster.engine import basics
from hvd_cluster.tensorflow.data.registry import ComputeClient
from hvd_cluster.topology import join_address

_SIDES = ("compute", "training")
#: In place of the secret of a world of one process.
_ALONE = secrets.token_bytes(32)
#: How many passes each world has shared, by its name.
_num_shared: Counter[str] = Counter()


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The addresses and the layout of a tf.data service.

    Raises:
        ValueError: a value is invalid.
    """

    #: Number of dispatchers: one for all ranks, or one for each.
    dispatchers: int
    #: Number of workers of each dispatcher.
    workers_per_dispatcher: int
    #: Which job runs the dispatchers: "compute", the job of the workers, or "training".
    dispatcher_side: str
    #: "host:port" of the service's registry, one for each interface of its host.
    addresses: list[str]
    #: The registry's secret: every process that holds it can connect.
    key: bytes
    #: Seconds to wait for a process to register.
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side={self.dispatcher_side!r}: use 'compute' or 'training'")
        if self.dispatchers < 1 or self.workers_per_dispatcher < 1:
            raise ValueError(
                f"dispatchers={self.dispatchers} and workers_per_dispatcher={self.workers_per_dispatcher} must be at "
                "least 1"
            )

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A client of the registry; its ``shutdown()`` ends the workers."""
        return ComputeClient(self.addresses, self.key, self.workers_per_dispatcher, self.timeout, verbose)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values. They include the key: do not print them."""
        return {
            "dispatchers": self.dispatchers,
            "workers_per_dispatcher": self.workers_per_dispatcher,
            "dispatcher_side": self.dispatcher_side,
            "addresses": list(self.addresses),
            "key": self.key.hex(),
            "timeout": self.timeout,
        }

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """The inverse of :meth:`to_dict`."""
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str) -> None:
        """Write to a file that only this user can read; the write is atomic."""
        path = Path(filename)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(self.to_dict(), file)
        temporary.replace(path)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read what :meth:`write` wrote, after a wait for the file if wanted.

        ``wait_for_file_creation`` waits without a time limit.

        Raises:
            FileNotFoundError: the file does not exist, and ``wait_for_file_creation`` is False.
        """
        path = Path(filename)
        while wait_for_file_creation and not path.exists():
            time.sleep(0.2)
        return TfDataServiceConfig.from_dict(json.loads(path.read_text()))


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Wait for this rank's dispatcher and its workers.

    On the training side, the dispatcher runs meanwhile. The workers stay with a dispatcher on the training side until
    they end: enter this context once. Training that is elastic, or that is started again while the workers run, needs
    dispatchers on the compute side.

    Args:
        compute_config: the service.
        rank: the rank of the training process. Rank r uses dispatcher ``r % dispatchers``; with dispatchers on the
            training side, rank r < dispatchers runs dispatcher r.

    Yields:
        The address for ``tf.data.experimental.service.distribute(service=...)``.

    Raises:
        TimeoutError: a dispatcher or a worker did not register in time; the text names it.
        RuntimeError: a dispatcher on the training side was run before.
    """
    client = compute_config.compute_client()
    dispatcher_id = rank % compute_config.dispatchers
    with ExitStack() as stack:
        if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
            stack.enter_context(_dispatcher(client, dispatcher_id))
        address = client.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(dispatcher_id, compute_config.timeout)
        yield f"grpc://{address}"


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Let the service's workers run the transformations of a dataset.

    This is also a method of ``tf.data.Dataset``.

    Args:
        dataset: the dataset that the workers prepare.
        compute_config: a service whose dispatchers are on the compute side.
        rank: the rank of this training process.
        size: number of training processes; needed for ``round_robin``.
        processing_mode: as for ``tf.data.experimental.service.distribute``.
        reuse_dataset: all ranks share one pass over the dataset, instead of one each. They must call this for the same
            datasets in the same order after ``hvd.init()``; in an elastic job, in the function that
            ``hvd.elastic.run`` decorates, so that the ranks of each new world share a new pass.
        round_robin: distribute the batches to the ranks in turn, so that all ranks process similar batches; requires
            ``reuse_dataset``, one dispatcher and an infinite dataset.

    Returns:
        The dataset that the workers produce.

    Raises:
        RuntimeError: the dispatchers are on the training side: use :func:`tf_data_service`, which runs them.
        ValueError: ``round_robin`` without its requirements, or ``reuse_dataset`` before ``hvd.init()``.
        TimeoutError: the service did not start in time.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service() does not run a dispatcher, and dispatcher_side is 'training': use "
            "`with tf_data_service(compute_config, rank) as address:` and tf.data.experimental.service.distribute()"
        )
    is_round_robin = reuse_dataset and round_robin
    if is_round_robin and (size is None or compute_config.dispatchers > 1):
        raise ValueError("round_robin=True requires the argument size and dispatchers=1")
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=_next_job_name() if reuse_dataset else None,
                consumer_index=rank if is_round_robin else None,
                num_consumers=size if is_round_robin else None,
            )
        )


def _next_job_name() -> str:
    """Equal on all ranks of the world, and never used before.

    The service returns the elements of the named job, whichever dataset the request contains: nothing if an earlier
    world, or an earlier training job, has read them.
    """
    world = basics.engine().world
    label = f"{world.topology.generation}/{world.topology.world}/{world.prefix}"
    name = hmac.digest(world.topology.secret or _ALONE, label.encode(), "sha256").hex()[:16]
    _num_shared[name] += 1
    return f"job.{name}.{_num_shared[name] - 1}"


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run one worker of the service, and this rank's dispatcher if it has one.

    ``compute_config`` describes the service. Returns after ``shutdown()``. Call it after ``hvd.init()`` on each rank;
    the service has one worker per rank.

    Raises:
        TimeoutError: the dispatcher did not register in time.
    """
    client = compute_config.compute_client()
    index = basics.rank()
    dispatcher_id, number = divmod(index, compute_config.workers_per_dispatcher)
    with ExitStack() as stack:
        if compute_config.dispatcher_side == "compute" and number == 0:
            stack.enter_context(_dispatcher(client, dispatcher_id))
        dispatcher = client.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        stack.enter_context(_worker(client, dispatcher, compute_config.timeout))
        client.register_worker_for_dispatcher(dispatcher_id, index)
        client.wait_for_shutdown()


@contextmanager
def _dispatcher(client: ComputeClient, dispatcher_id: int) -> Iterator[None]:
    server = tf.data.experimental.service.DispatchServer(tf.data.experimental.service.DispatcherConfig(port=0))
    with _stopping(server._stop):
        port = int(server.target.rpartition(":")[2])
        client.register_dispatcher(dispatcher_id, join_address(client.local_host(), port))
        yield


@contextmanager
def _worker(client: ComputeClient, dispatcher_address: str, timeout_s: float) -> Iterator[None]:
    # TensorFlow replaces %port% by the port it binds.
    config = tf.data.experimental.service.WorkerConfig(
        dispatcher_address=dispatcher_address,
        worker_address=join_address(client.local_host(), "%port%"),
        port=0,
        heartbeat_interval_ms=1000,
        dispatcher_timeout_ms=int(timeout_s * 1000),
    )
    with _stopping(tf.data.experimental.service.WorkerServer(config)._stop):
        yield


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """Stop a server on exit.

    TensorFlow stops it only when it is garbage-collected, and has no public method.
    """
    try:
        yield
    finally:
        stop()
