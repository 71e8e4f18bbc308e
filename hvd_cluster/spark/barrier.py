"""What one barrier task does: agree on ranks with the others, run its workers as children, say how they ended."""

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
from hvd_cluster.errors import DataError
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.placement import Placement, place
from hvd_cluster.rendezvous.secret import certificate_of
from hvd_cluster.spark import handshake, host, messages
from hvd_cluster.spark.driver_connection import DriverConnection
from hvd_cluster.spark.encryption import OPEN_TENSORS_TEXT, gloo_variables
from hvd_cluster.spark.end_tracker import EndTracker, reach
from hvd_cluster.spark.handshake import TaskHandshake
from hvd_cluster.spark.plan import TaskPlan, Versions, sign
from hvd_cluster.spark.task_workers import TaskWorkers
from hvd_cluster.topology import join_address

#: A row of the job holds at most this many bytes of an outcome.
_PIECE_BYTES = 32 << 20
#: Slot, kind, data: see :data:`hvd_cluster.spark.task.SCHEMA`.
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
        context: the ``BarrierTaskContext``.
        versions: those of the driver, readable whatever version wrote ``plan``.
        plan: a pickled :class:`TaskPlan`.
        call: the packed call as :meth:`Session.ship` sent it.
        received: in it the rows of this task are there; its value is variables for this task's workers alone.

    Returns:
        The rows as (slot, kind, data): pieces of signed outcomes, or "problem"s in words.
    """
    task = context.partitionId()
    if versions["hvd_cluster"] != hvd_cluster.__version__:
        handshakes = handshake.exchange(context, handshake.refusal(task, Versions(**versions)))
        return _problems(task, [one.problem for one in handshakes])
    job: TaskPlan = pickle.loads(plan)  # Spark brought it, as it brought this function
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(DriverConnection(job.driver_addresses, job.secret))
        # Before the rows, which may take minutes: a death while they come is one that the driver can tell.
        driver.tell(messages.TaskStarted(task, socket.gethostname()))
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
            driver.tell(messages.TaskWarning(warning))
        outcomes = _take_part(task, job, handshakes, call, driver)
    rows: list[Row] = []
    for slot, outcome in outcomes.items():
        signed = sign(outcome, slot, job.secret)
        pieces = range(0, len(signed), _PIECE_BYTES)
        rows += [(slot, "outcome", signed[start : start + _PIECE_BYTES]) for start in pieces]
    return rows


def receive(call: Any) -> bytes:
    """The packed call, from what :meth:`Session.ship` returned: bytes, the name of an artifact, or a broadcast."""
    if isinstance(call, bytes):
        return call
    if isinstance(call, str):
        from pyspark import SparkFiles

        return Path(SparkFiles.get(call)).read_bytes()
    value: bytes = call.value
    return value


def _problems(task: int, texts: Sequence[str]) -> list[Row]:
    return [(task, "problem", text.encode()) for text in texts if text]


def _take_part(
    task: int, job: TaskPlan, handshakes: Sequence[TaskHandshake], call: Any, driver: DriverConnection
) -> dict[int, Outcome]:
    """Run the workers of this task in the world that all tasks have agreed on, to their end; outcomes by slot."""
    placements = place(handshake.slots(handshakes, job.workers_per_task))
    mine = [one for one in placements if one.slot.index // job.workers_per_task == task]
    first = placements[0].slot
    chief = handshakes[first.index // job.workers_per_task]
    store_port, master_port = chief.ports
    beside_rank_0 = mine[0].slot.host_key == first.host_key
    with _reporting_errors(driver, mine):
        candidates = [host.LOOPBACK] if beside_rank_0 else chief.addresses
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
        if not beside_rank_0:  # the interface that leads to the others
            topologies = [replace(topology, host=client.local_host) for topology in topologies]
        driver.tell(messages.RanksAssigned(task, tuple(one.rank for one in mine), topologies[0].host))
        end_tracker = EndTracker(client, len(placements))
        with _reporting_errors(driver, mine):
            packed = receive(call)
            certificate = certificate_of(job.secret) if len({one.slot.host_key for one in placements}) > 1 else b""
            with gloo_variables(certificate) as variables:
                if certificate and not variables and mine[0].rank == 0:
                    driver.tell(messages.TaskWarning(OPEN_TENSORS_TEXT))
                outcomes = TaskWorkers(topologies, mine, job, packed, driver, variables).run(end_tracker)
        if mine[0].rank == 0:  # the store goes with this task
            end_tracker.wait_for_ends(driver.stop_requested.is_set)
    return {one.slot.index: outcome for one, outcome in zip(mine, outcomes, strict=True)}


@contextlib.contextmanager
def _reporting_errors(driver: DriverConnection, mine: Sequence[Placement]) -> Iterator[None]:
    """Let the driver know of an error of this task, with its rank; Spark fails the stage for it, and knows no ranks."""
    try:
        yield
    except Exception as error:  # whatever it is: it is told with its rank, and raised again
        report = ErrorReport.of(error)
        driver.tell(
            messages.WorkerEnded(Outcome(mine[0].rank, mine[0].slot.address, error=report, finished_at=time.time()))
        )
        raise
