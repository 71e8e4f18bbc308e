"""What one barrier task does: agree on ranks with the others, run its worker as a child, say how it ended."""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hvd_cluster
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.placement import Placement, place
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.spark import greeting, host, messages
from hvd_cluster.spark.driver_line import DriverLine
from hvd_cluster.spark.greeting import Greeting
from hvd_cluster.spark.peers import Peers, reach
from hvd_cluster.spark.plan import Plan, Versions, sign
from hvd_cluster.topology import Topology, join_address

#: A row of the job holds at most this many bytes of an outcome.
_PIECE_BYTES = 32 << 20
#: Seconds between SIGTERM and SIGKILL for a worker that has to go.
_TERM_S = 2.0


def perform(context: Any, versions: dict[str, str], plan: bytes, call: Any) -> list[tuple[str, bytes]]:
    """Run the worker of this task to its end.

    Args:
        context: the ``BarrierTaskContext``.
        versions: those of the driver, readable whatever version wrote ``plan``.
        plan: a pickled :class:`Plan`.
        call: the packed call as :meth:`Session.ship` sent it.

    Returns:
        The rows as (kind, data): pieces of a signed outcome, or "problem"s in words.
    """
    seat = context.partitionId()
    if versions["hvd_cluster"] != hvd_cluster.__version__:
        greetings = greeting.exchange(context, greeting.refusal(seat, Versions(**versions)))
        return _problems([one.problem for one in greetings])
    job: Plan = pickle.loads(plan)  # Spark brought it, as it brought this function
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(DriverLine(job.driver_addresses, job.secret))
        driver.tell(messages.Seated(seat, socket.gethostname()))
        greetings = greeting.meet(context, job, stack)
        problems, warnings = greeting.judge(job.versions, greetings)
        if problems:
            return _problems(problems)
        for warning in warnings if seat == 0 else ():
            driver.tell(messages.Warned(warning))
        outcome = _take_part(seat, job, greetings, call, driver)
    signed = sign(outcome, job.secret)
    return [("outcome", signed[start : start + _PIECE_BYTES]) for start in range(0, len(signed), _PIECE_BYTES)]


def receive(call: Any) -> bytes:
    """The packed call, from what :meth:`Session.ship` returned: bytes, the name of an artifact, or a broadcast."""
    if isinstance(call, bytes):
        return call
    if isinstance(call, str):
        from pyspark import SparkFiles

        return Path(SparkFiles.get(call)).read_bytes()
    value: bytes = call.value
    return value


def _problems(texts: Sequence[str]) -> list[tuple[str, bytes]]:
    return [("problem", text.encode()) for text in texts if text]


def _take_part(seat: int, job: Plan, greetings: Sequence[Greeting], call: Any, driver: DriverLine) -> Outcome:
    """Run the worker of this seat in the world that all tasks have agreed on, to its end."""
    placements = place(greeting.seats(greetings))
    mine = next(one for one in placements if one.seat.index == seat)
    first = placements[0].seat
    store_port, master_port = greetings[first.index].ports
    beside_rank_0 = mine.seat.host_key == first.host_key
    with _telling(driver, mine):
        candidates = [host.LOOPBACK] if beside_rank_0 else greetings[first.index].addresses
        client, reached = reach(candidates, store_port, job.secret)
    with contextlib.closing(client):
        first_host = first.address if beside_rank_0 else reached
        topology = mine.topology(
            rendezvous=join_address(first_host, store_port),
            master=join_address(first_host, master_port),
            secret=job.secret,
            job_id=job.job_id,
        )
        if not beside_rank_0:
            topology = replace(topology, host=client.local_host)  # the interface that leads to the others
        driver.tell(messages.Placed(seat, mine.rank, topology.host))
        peers = Peers(client, mine.rank, mine.size)
        with _telling(driver, mine):
            outcome = _supervise(topology, mine, job, receive(call), driver, peers)
        driver.tell(messages.Ended(replace(outcome, value=b"" if outcome.ok else None)))
        peers.announce_end(outcome.ok)
        if mine.rank == 0:  # the store goes with this task
            peers.wait_for_ends(driver.stop_requested.is_set)
    return outcome


@contextlib.contextmanager
def _telling(driver: DriverLine, mine: Placement) -> Iterator[None]:
    """Let the driver know of an error of this task, with its rank; Spark fails the stage for it, and knows no ranks."""
    try:
        yield
    except Exception as error:  # whatever it is: it is told with its rank, and raised again
        report = ErrorReport.of(error)
        driver.tell(messages.Ended(Outcome(mine.rank, mine.seat.address, error=report, finished_at=time.time())))
        raise


def _supervise(
    topology: Topology, mine: Placement, job: Plan, call: bytes, driver: DriverLine, peers: Peers
) -> Outcome:
    """Run the worker until it ends, or stop it: when the driver asks, or some time after another rank has failed."""
    try:
        worker = WorkerProcess(
            topology,
            call,
            env={**mine.device_env(), "HOROVOD_SPARK_WORK_DIR": str(Path.cwd()), **job.env},
            executable=job.executable,
            on_line=lambda rank, stream, text: driver.tell(messages.Line(rank, stream, text)),
            on_event=lambda rank, fields: driver.tell(messages.Event(rank, fields)),
        )
    except OSError as error:
        return Outcome(topology.rank, topology.host, error=ErrorReport.of(error), finished_at=time.time())
    try:
        while (outcome := worker.wait(0.1)) is None:
            if driver.stop_requested.is_set() or time.monotonic() >= peers.deadline_s():
                worker.stop(_TERM_S)
        return outcome
    finally:
        worker.kill()
