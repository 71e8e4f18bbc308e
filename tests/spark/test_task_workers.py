"""How tasks notice each other's ends: a real store, a client per task."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import pytest

from hvd_cluster.errors import WorkerFailedError, WorldEndedError
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.worker_group import FAILURE_GRACE_S
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.spark import barrier
from hvd_cluster.spark.driver_connection import DriverConnection
from hvd_cluster.spark.handshake import TaskHandshake
from hvd_cluster.spark.messages import Message, RanksAssigned, TaskPlan, TaskStarted, Versions
from hvd_cluster.spark.progress import Progress
from hvd_cluster.spark.task_workers import EndTracker, reach


@pytest.fixture
def trackers() -> Iterator[list[EndTracker]]:
    secret = new_secret()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(KeyValueServer(secret))
        clients = [reach(["no-such-host.invalid", "127.0.0.1"], server.port, secret) for _ in range(3)]
        for client, address in clients:
            stack.enter_context(contextlib.closing(client))
            assert address == "127.0.0.1"
        yield [EndTracker(client, 3) for client, _ in clients]


@pytest.mark.long
def test_a_worker_may_continue_until_another_one_has_failed(trackers: list[EndTracker]) -> None:
    assert trackers[0].deadline_s() == math.inf
    trackers[1].announce_end(1, ok=True)
    time.sleep(0.6)
    assert trackers[0].deadline_s() == math.inf
    trackers[2].announce_end(2, ok=False)
    time.sleep(0.6)
    left_s = trackers[0].deadline_s() - time.monotonic()
    assert FAILURE_GRACE_S - 1 < left_s <= FAILURE_GRACE_S


@pytest.mark.long
def test_the_store_is_kept_until_all_have_ended(trackers: list[EndTracker]) -> None:
    asked: list[int] = []

    def give_up() -> bool:
        asked.append(1)
        if len(asked) == 2:
            trackers[2].announce_end(2, ok=False)
        return len(asked) > 5

    trackers[0].announce_end(0, ok=True)
    trackers[1].announce_end(1, ok=True)
    trackers[0].wait_for_ends(give_up)
    assert len(asked) == 2


def test_a_host_that_cannot_be_reached_is_named_with_every_address() -> None:
    with pytest.raises(ConnectionError, match="the host of rank 0 cannot be reached: .*no-such-host.*127.0.0.1:1"):
        reach(["no-such-host.invalid", "127.0.0.1"], 1, new_secret())


@pytest.mark.processes
def test_the_task_that_finds_the_host_of_rank_0_gone_names_it_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    server = KeyValueServer(secret := new_secret())
    progress = Progress(2)
    progress.handle(TaskStarted(0, "a"))
    progress.handle(RanksAssigned(0, (0,), "127.0.0.1"))

    def send(_: DriverConnection, message: Message) -> None:
        if isinstance(message, RanksAssigned):
            server.close()
        progress.handle(message)

    monkeypatch.setattr(DriverConnection, "send", send)
    plan = TaskPlan(
        workers_per_task=1,
        job_id="job",
        secret=secret,
        driver_addresses=(),
        env={},
        executable=None,
        as_horovod=False,
        versions=Versions.here(),
    )
    ports = (server.port, 1)
    tasks = [
        TaskHandshake(slot=slot, host_key=host, addresses=["127.0.0.1"], ports=ports) for slot, host in enumerate("ab")
    ]
    with (
        server,
        DriverConnection((), secret) as driver,
        pytest.raises(WorldEndedError, match="the Spark task of rank 0, which has .* is gone"),
    ):
        barrier._run_workers(1, plan, tasks, pack(int), driver)
    error = progress.failure("stage failed")
    assert str(error).startswith("Rank 0 on host a was lost")
    assert isinstance(error, WorkerFailedError)
    assert (error.rank, error.died) == (0, True)
