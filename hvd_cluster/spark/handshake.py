"""The one message that each task sends to all others before ranks are agreed.

One, because a round takes Spark a second.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hvd_cluster.launch.placement import Slot, place
from hvd_cluster.rendezvous.addresses import host_key
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import ANY, LOOPBACK, ReservedPort
from hvd_cluster.spark import host
from hvd_cluster.spark.devices import task_gpus
from hvd_cluster.spark.messages import TaskPlan, Versions, disagreements
from hvd_cluster.topology import split_address


@dataclass(frozen=True, kw_only=True)
class TaskHandshake:
    """A task's message to all tasks."""

    #: Its partition.
    slot: int
    #: See :func:`hvd_cluster.rendezvous.addresses.host_key`.
    host_key: str = ""
    #: Addresses of its host, the most likely first.
    addresses: Sequence[str] = ()
    #: The GPUs that the scheduler assigned to it.
    gpus: Sequence[str] = ()
    #: Fields of its :class:`Versions`.
    versions: dict[str, str] = field(default_factory=dict)
    #: From slot 0: the ports of the job's key-value store and for torch.distributed's rendezvous.
    ports: Sequence[int] = ()
    #: From slot 0: those ports are open on the loopback interface only.
    loopback: bool = False
    #: Why this task cannot take part; empty if it can.
    problem: str = ""


def exchange(context: Any, handshake: TaskHandshake) -> list[TaskHandshake]:
    """Send a handshake to the other tasks, and return theirs in order of slots."""
    texts = context.allGather(json.dumps(asdict(handshake)))
    return sorted((TaskHandshake(**json.loads(text)) for text in texts), key=lambda one: one.slot)


def exchange_all(context: Any, job: TaskPlan, stack: contextlib.ExitStack) -> list[TaskHandshake]:
    """Exchange handshakes; slot 0 opens the job's key-value store on ``stack``.

    The task of slot 0 will have rank 0.
    """
    infos = context.getTaskInfos()
    names = [split_address(info.address)[0] for info in infos]
    mine = _introduce(context, names[context.partitionId()], job)
    handshakes = exchange(context, _open_store(mine, job.secret, len(set(names)) == 1, stack))
    refused = any(one.problem for one in handshakes)  # a task that refuses does not take part in another round
    if not refused and handshakes[0].loopback and len({one.host_key for one in handshakes}) > 1:
        # Spark has one name for several machines: repeat it with ports that the others can reach.
        handshakes = exchange(context, _open_store(mine, job.secret, False, stack))
    return handshakes


def check_handshakes(job: TaskPlan, handshakes: Sequence[TaskHandshake]) -> tuple[list[str], list[str]]:
    """What keeps these tasks from working together, and warnings.

    All tasks get the same result.
    """
    problems = list(dict.fromkeys(one.problem for one in handshakes if one.problem))
    if problems:
        return problems, []
    by_host = {one.addresses[0]: Versions(**one.versions) for one in handshakes}
    problems, warnings = disagreements(job.versions, by_host)
    try:
        place(slots(handshakes, job.workers_per_task))
    except ValueError as error:
        problems.append(f"the workers cannot be placed: {error}")
    return problems, warnings


def slots(handshakes: Sequence[TaskHandshake], workers_per_task: int = 1) -> list[Slot]:
    """The slots of the tasks, for :func:`hvd_cluster.launch.placement.place`.

    Raises:
        ValueError: the GPUs of a task cannot be divided equally.
    """
    is_one_host = len({one.host_key for one in handshakes}) == 1
    found: list[Slot] = []
    for one in handshakes:
        each, left = divmod(len(one.gpus), workers_per_task)
        if left:
            raise ValueError(
                f"workers_per_task={workers_per_task}, but Spark has assigned {len(one.gpus)} GPUs to a task: set "
                f"spark.task.resource.gpu.amount to a multiple of {workers_per_task}"
            )
        address = LOOPBACK if is_one_host else one.addresses[0]
        for index_in_task in range(workers_per_task):
            own = one.gpus[index_in_task * each : (index_in_task + 1) * each]
            found.append(Slot(one.slot * workers_per_task + index_in_task, one.host_key, address, tuple(own)))
    return found


def refusal(slot: int, driver: Versions) -> TaskHandshake:
    """The handshake of a task that cannot read its plan of another version."""
    errors, _ = disagreements(driver, {socket.gethostname(): Versions.here()})
    return TaskHandshake(slot=slot, problem="; ".join(errors))


def _introduce(context: Any, name: str, job: TaskPlan) -> TaskHandshake:
    return TaskHandshake(
        slot=context.partitionId(),
        # With the name: virtual machines that were restored from one snapshot have equal kernel and namespace ids.
        host_key=f"{socket.gethostname()}/{host_key()}",
        addresses=host.addresses([name], [split_address(address)[0] for address in job.driver_addresses]),
        gpus=task_gpus(context),
        versions=asdict(Versions.here()),
    )


def _open_store(handshake: TaskHandshake, secret: bytes, loopback: bool, stack: contextlib.ExitStack) -> TaskHandshake:
    if handshake.slot != 0:
        return handshake
    address = LOOPBACK if loopback else ANY
    server = stack.enter_context(KeyValueServer(secret, address))
    master = stack.enter_context(ReservedPort(address))
    return replace(handshake, ports=(server.port, master.port), loopback=loopback)
