"""What one barrier task does: agree on ranks with the others, run its worker as a child, say how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import hvd_cluster
from hvd_cluster.launch.outcome import ErrorReport, Outcome
from hvd_cluster.launch.placement import Placement, Seat, place
from hvd_cluster.launch.ports import ReservedPort
from hvd_cluster.launch.process import WorkerProcess
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.spark import host, sidechannel
from hvd_cluster.spark.plan import Plan, Versions, disagreements, sign
from hvd_cluster.spark.sidechannel import DriverLine
from hvd_cluster.topology import Topology, join_address, split_address

logger = logging.getLogger(__name__)

#: A row of the job holds at most this many bytes of an outcome.
_PIECE_BYTES = 32 << 20
#: Seconds that the other workers have for an error of their own after one has failed.
GRACE_S = 10.0
#: Seconds between SIGTERM and SIGKILL for a worker that has to go.
_TERM_S = 2.0
#: Seconds for reaching the job's key-value store from another host, for each candidate address.
_REACH_S = 5.0
_FAILED_KEY = "launch/failed"


@dataclass(frozen=True)
class _Greeting:
    """What every task tells the others first."""

    seat: int
    host_key: str = ""
    #: Addresses of its host, the likeliest first.
    addresses: Sequence[str] = ()
    gpus: Sequence[str] = ()
    versions: dict[str, str] | None = None
    #: Why this task cannot take part; empty if it can.
    problem: str = ""


def perform(context: Any, versions: dict[str, str], plan: bytes, call: Any) -> list[tuple[str, bytes]]:
    """Run the worker of this task to its end.

    Args:
        context: the ``BarrierTaskContext``.
        versions: those of the driver, readable whatever version wrote ``plan``.
        plan: a pickled :class:`Plan`.
        call: the packed call as :meth:`Session.ship` sent it.

    Returns:
        The rows as (kind, data): pieces of a signed outcome, or one "problem" in words.
    """
    seat = context.partitionId()
    if versions["hvd_cluster"] != hvd_cluster.__version__:
        errors, _ = disagreements(Versions(**versions), {socket.gethostname(): Versions.here()})
        _greet(context, _Greeting(seat, problem="; ".join(errors)))
        return [("problem", "; ".join(errors).encode())]
    job: Plan = pickle.loads(plan)  # Spark brought it, as it brought this function
    with DriverLine(job.driver_addresses, job.secret) as driver:
        driver.tell(sidechannel.Seated(seat, socket.gethostname()))
        greetings = _greet(context, _greeting(context, job))
        problems, warnings = _judge(job, greetings)
        if problems:
            return [("problem", problem.encode()) for problem in problems]
        if seat == 0:
            for warning in warnings:
                driver.tell(sidechannel.Warned(warning))
        outcome = _run_worker(context, job, greetings, call, driver)
        driver.tell(sidechannel.Ended(replace(outcome, value=None if outcome.value is None else b"")))
        # The key-value store lives in one of the tasks, and may be needed until the last worker has ended.
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


def _greeting(context: Any, job: Plan) -> _Greeting:
    resources = context.resources()
    known = [split_address(context.getTaskInfos()[context.partitionId()].address)[0]]
    return _Greeting(
        seat=context.partitionId(),
        host_key=host.machine_key(),
        addresses=host.addresses(known, [split_address(address)[0] for address in job.driver_addresses]),
        gpus=[str(gpu) for gpu in resources["gpu"].addresses] if "gpu" in resources else [],
        versions=asdict(Versions.here()),
    )


def _greet(context: Any, greeting: _Greeting) -> list[_Greeting]:
    """Give ``greeting`` to the other tasks and get theirs, in the order of the seats."""
    texts = context.allGather(json.dumps(asdict(greeting)))
    return sorted((_Greeting(**json.loads(text)) for text in texts), key=lambda one: one.seat)


def _judge(job: Plan, greetings: Sequence[_Greeting]) -> tuple[list[str], list[str]]:
    """What keeps these tasks from working together, and what is worth a warning. Equal in all tasks."""
    problems = list(dict.fromkeys(one.problem for one in greetings if one.problem))
    if problems:
        return problems, []
    by_host = {one.host_key: Versions(**one.versions) for one in greetings if one.versions}
    problems, warnings = disagreements(job.versions, by_host)
    try:
        place(_seats(greetings))
    except ValueError as error:
        problems.append(f"the workers cannot be placed: {error}")
    return problems, warnings


def _seats(greetings: Sequence[_Greeting]) -> list[Seat]:
    alone = len({one.host_key for one in greetings}) == 1
    return [
        Seat(one.seat, one.host_key, host.LOOPBACK if alone else one.addresses[0], tuple(one.gpus)) for one in greetings
    ]


def _run_worker(context: Any, job: Plan, greetings: Sequence[_Greeting], call: Any, driver: DriverLine) -> Outcome:
    placements = place(_seats(greetings))
    mine = next(one for one in placements if one.seat.index == context.partitionId())
    first = placements[0].seat
    alone = mine.local_size == mine.size
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        if mine.rank == 0:
            everywhere = host.LOOPBACK if alone else host.ANY
            server = stack.enter_context(KeyValueServer(job.secret, everywhere))
            master = stack.enter_context(ReservedPort(everywhere))
            ports = [server.port, master.port]
        told = [json.loads(text) for text in context.allGather(json.dumps(ports))]
        server_port, master_port = next(text for text in told if text)
        candidates = [host.LOOPBACK] if mine.seat.host_key == first.host_key else greetings[first.index].addresses
        client = stack.enter_context(contextlib.closing(_reach(candidates, server_port, job.secret)))
        server_host = first.address if mine.seat.host_key == first.host_key else split_address(client.address)[0]
        topology = mine.topology(
            rendezvous=join_address(server_host, server_port),
            master=join_address(server_host, master_port),
            secret=job.secret,
            job_id=job.job_id,
        )
        if mine.seat.host_key != first.host_key:
            topology = replace(topology, host=client.local_host)  # the interface that reaches the others
        driver.tell(sidechannel.Placed(context.partitionId(), mine.rank, topology.host))
        outcome = _supervise(topology, mine, job, receive(call), driver, client)
        with contextlib.suppress(ConnectionError):  # the store is gone only when all is lost anyway
            if not outcome.ok:
                client.set(_FAILED_KEY, str(mine.rank).encode())
        context.barrier()
    return outcome


def _reach(hosts: Sequence[str], port: int, secret: bytes) -> KeyValueClient:
    """A client of the job's store at whichever of its host's addresses can be reached from here."""
    errors: list[str] = []
    for one in hosts:
        try:
            return KeyValueClient(join_address(one, port), secret, _REACH_S)
        except (ConnectionError, TimeoutError) as error:
            errors.append(str(error))
    raise ConnectionError("the host of rank 0 cannot be reached: " + "; ".join(errors))


def _supervise(
    topology: Topology, mine: Placement, job: Plan, call: bytes, driver: DriverLine, client: KeyValueClient
) -> Outcome:
    """Run the worker until it ends, or stop it: when the driver asks, or some time after another rank has failed."""
    env = {**mine.device_env(), "HOROVOD_SPARK_WORK_DIR": str(Path.cwd()), **job.env}
    try:
        worker = WorkerProcess(
            topology,
            call,
            env=env,
            executable=job.executable,
            on_line=lambda rank, stream, text: driver.tell(sidechannel.Line(rank, stream, text)),
            on_event=lambda rank, fields: driver.tell(sidechannel.Event(rank, fields)),
        )
    except OSError as error:
        return Outcome(topology.rank, topology.host, error=ErrorReport.of(error), finished_at=time.time())
    deadlines = _deadlines(driver, client, num_workers=topology.size)
    try:
        while (outcome := worker.wait(0.1)) is None:
            if time.monotonic() >= next(deadlines):
                worker.stop(_TERM_S)
        return outcome
    finally:
        worker.kill()


def _deadlines(driver: DriverLine, client: KeyValueClient, num_workers: int) -> Iterator[float]:
    """At each step the time (``time.monotonic``) by which the worker must have ended; infinity while all is well."""
    period_s = max(0.5, num_workers / 500)  # all tasks ask one thread of rank 0's task
    deadline_s, next_look_s = float("inf"), 0.0
    while True:
        now_s = time.monotonic()
        if driver.stop_requested.is_set():
            deadline_s = now_s
        elif deadline_s == float("inf") and now_s >= next_look_s:
            next_look_s = now_s + period_s
            if _another_failed(client):
                deadline_s = now_s + GRACE_S
        yield deadline_s


def _another_failed(client: KeyValueClient) -> bool:
    try:
        return client.check([_FAILED_KEY])
    except ConnectionError:
        return True  # the task of rank 0 is gone
