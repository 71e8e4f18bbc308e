"""What a worker tells the driver while it runs, pickled, over a signed channel; what it told Ray when it was asked."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.launch.wire.messages import ProgressEvent


@dataclass(frozen=True)
class ActorHandshake:
    """An actor's answer to the driver's first question."""

    #: The Ray node that it runs on.
    node_id: str
    #: Where its node is for the others.
    address: str
    hostname: str
    pid: int
    #: Ray's id of its process.
    worker_id: str
    #: The GPUs that Ray gave to this actor, as CUDA_VISIBLE_DEVICES spells them.
    gpus: tuple[str, ...]
    #: Where it waits for the driver to call.
    driver_port: int
    #: A free port of its node for torch.distributed's own rendezvous.
    master_port: int
    #: hvd_cluster's there.
    version: str


@dataclass(frozen=True)
class OutputLines:
    """Lines of its output; ``stream`` is "stdout" or "stderr"."""

    stream: str
    texts: list[str]


@dataclass(frozen=True)
class LogRecord:
    """What ``ray_logger.log`` was given, pickled."""

    info: bytes


@dataclass(frozen=True)
class CallFinished:
    """A call has ended, and all its output was sent; Ray brings its outcome."""


Message = OutputLines | ProgressEvent | LogRecord | CallFinished
