"""A barrier task: agrees on ranks, runs its workers, returns their outcomes.

The workers are its child processes.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hvd_cluster
from hvd_cluster.errors import DataError, WorldEndedError
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.placement import Placement, place
from hvd_cluster.rendezvous.secret import certificate_of
from hvd_cluster.rendezvous.sockets import LOOPBACK
from hvd_cluster.spark import handshake, messages
from hvd_cluster.spark.driver_connection import DriverConnection
from hvd_cluster.spark.encryption import OPEN_TENSORS_TEXT, gloo_variables
from hvd_cluster.spark.handshake import TaskHandshake
from hvd_cluster.spark.messages import TaskPlan, Versions, sign
from hvd_cluster.spark.task_workers import EndTracker, TaskWorkers, reach
from hvd_cluster.topology import join_address

#: Maximum number of bytes of an outcome in one row of the job.
_MAX_ROW_BYTES = 32 << 20
#: Slot, kind, data: see :data:`hvd_cluster.spark.task_function.SCHEMA`.
Row = tuple[int, str, bytes]


def perform(
    context: Any,
    versions: dict[str, str],
    plan: bytes,
    call: Any,
    received: contextlib.AbstractContextManager[Mapping[str, str]] | None = None,
) -> list[Row]:
    """Run the workers of this task to their end.

    Args:
        versions: the driver's versions, in a form that every version can read.
        call: the packed call as :meth:`Session.ship` sent it.
        received: a context in which the rows of this task are available; its value is variables for this task's
            workers.

    Returns:
        The rows as (slot, kind, data): pieces of signed outcomes, or problems as text.
    """
    task = context.partitionId()
    if versions["hvd_cluster"] != hvd_cluster.__version__:
        handshakes = handshake.exchange(context, handshake.refusal(task, Versions(**versions)))
        return _problems(task, [one.problem for one in handshakes])
    job: TaskPlan = pickle.loads(plan)  # trusted: Spark sent it together with this function
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(DriverConnection(job.driver_addresses, job.secret))
        # Before the rows, which may take minutes, so that the driver can report a task that dies while they arrive.
        driver.send(messages.TaskStarted(task, socket.gethostname()))
        try:
            variables = stack.enter_context(received) if received is not None else {}
        except DataError as error:
            handshakes = handshake.exchange(context, TaskHandshake(slot=task, problem=str(error)))
            return _problems(task, [one.problem for one in handshakes])
        job = replace(job, env={**job.env, **variables})
        handshakes = handshake.exchange_all(context, job, stack)
        problems, warnings = handshake.check_handshakes(job, handshakes)
        if problems:
            return _problems(task, problems)
        for warning in warnings if task == 0 else ():
            driver.send(messages.TaskWarning(warning))
        outcomes = _run_workers(task, job, handshakes, call, driver)
    rows: list[Row] = []
    for slot, outcome in outcomes.items():
        signed = sign(outcome, slot, job.secret)
        pieces = range(0, len(signed), _MAX_ROW_BYTES)
        rows += [(slot, "outcome", signed[start : start + _MAX_ROW_BYTES]) for start in pieces]
    return rows


def receive(call: Any) -> bytes:
    """The packed call, from what :meth:`Session.ship` returned.

    That is bytes, the name of an artifact, or a broadcast.
    """
    if isinstance(call, bytes):
        return call
    if isinstance(call, str):
        from pyspark import SparkFiles

        return Path(SparkFiles.get(call)).read_bytes()
    value: bytes = call.value
    return value


def _problems(task: int, texts: Sequence[str]) -> list[Row]:
    return [(task, "problem", text.encode()) for text in texts if text]


def _run_workers(
    task: int, job: TaskPlan, handshakes: Sequence[TaskHandshake], call: Any, driver: DriverConnection
) -> dict[int, Outcome]:
    """Run the workers of this task, and return their outcomes by slot.

    All tasks have agreed on the world.
    """
    placements = place(handshake.slots(handshakes, job.workers_per_task))
    mine = [one for one in placements if one.slot.index // job.workers_per_task == task]
    first = placements[0].slot
    rank_0_task = handshakes[first.index // job.workers_per_task]
    store_port, master_port = rank_0_task.ports
    beside_rank_0 = mine[0].slot.host_key == first.host_key
    with _reporting_errors(driver, mine):
        candidates = [LOOPBACK] if beside_rank_0 else rank_0_task.addresses
        client, reached = reach(candidates, store_port, job.secret)
    with contextlib.closing(client):
        first_host = first.address if beside_rank_0 else reached
        topologies = [
            one.topology(
                rendezvous=join_address(first_host, store_port),
                master=join_address(first_host, master_port),
                secret=job.secret,
                job_id=job.job_id,
            )
            for one in mine
        ]
        if not beside_rank_0:  # use the interface on the route to the others
            topologies = [replace(topology, host=client.local_host) for topology in topologies]
        driver.send(messages.RanksAssigned(task, tuple(one.rank for one in mine), topologies[0].host))
        end_tracker = EndTracker(client, len(placements))
        with _reporting_errors(driver, mine):
            packed = receive(call)
            certificate = certificate_of(job.secret) if len({one.slot.host_key for one in placements}) > 1 else b""
            with gloo_variables(certificate) as variables:
                if certificate and not variables and mine[0].rank == 0:
                    driver.send(messages.TaskWarning(OPEN_TENSORS_TEXT))
                try:
                    outcomes = TaskWorkers(topologies, mine, job, packed, driver, variables).run(end_tracker)
                except WorldEndedError:
                    # The driver may not see it for minutes: a host that disappears closes no connection.
                    driver.send(messages.TaskLost(first.index // job.workers_per_task))
                    raise
        if mine[0].rank == 0:  # the key-value store ends with this task
            end_tracker.wait_for_ends(driver.stop_requested.is_set)
    return {one.slot.index: outcome for one, outcome in zip(mine, outcomes, strict=True)}


@contextlib.contextmanager
def _reporting_errors(driver: DriverConnection, mine: Sequence[Placement]) -> Iterator[None]:
    """Report an error of this task to the driver with its rank.

    Spark fails the stage for such an error, but it does not know ranks.
    """
    try:
        yield
    except Exception as error:  # of any kind; it is reported with its rank and re-raised
        report = ErrorReport.of(error)
        driver.send(
            messages.WorkerEnded(Outcome(mine[0].rank, mine[0].slot.address, error=report, finished_at=time.time()))
        )
        raise
