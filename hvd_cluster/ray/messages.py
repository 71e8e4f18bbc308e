"""The messages between a Ray actor and its driver."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.launch.wire.messages import ProgressEvent


@dataclass(frozen=True)
class ActorHandshake:
    """An actor's answer to the driver's first call."""

    #: The Ray node that it runs on.
    node_id: str
    #: The node's address for the other nodes.
    address: str
    hostname: str
    pid: int
    #: Ray's id of its process.
    worker_id: str
    #: The GPUs that Ray assigned to this actor, as in CUDA_VISIBLE_DEVICES.
    gpus: tuple[str, ...]
    #: The port on which it waits for the driver.
    driver_port: int
    #: A free port of its node for torch.distributed's own rendezvous.
    master_port: int
    #: The version of hvd_cluster there.
    version: str


@dataclass(frozen=True)
class OutputLines:
    """Lines of its output; ``stream`` is "stdout" or "stderr"."""

    stream: str
    texts: list[str]


@dataclass(frozen=True)
class LogRecord:
    """The argument of ``ray_logger.log``, pickled."""

    info: bytes


@dataclass(frozen=True)
class CallFinished:
    """A call has ended and all its output was sent; Ray brings its outcome."""

    #: The driver's number of the call.
    number: int


Message = OutputLines | ProgressEvent | LogRecord | CallFinished
