"""What tasks agree on before they start workers: tasks are threads here, and Spark's rounds a barrier of theirs."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.spark import handshake
from hvd_cluster.spark.handshake import TaskHandshake
from hvd_cluster.spark.messages import TaskPlan, Versions


class Task:
    """What handshake asks of a ``BarrierTaskContext``; a round that another task does not join ends after 20 s."""

    def __init__(self, index: int, round_: threading.Barrier, texts: dict[int, str]) -> None:
        self._index, self._round, self._texts = index, round_, texts
        self.rounds = 0

    def partitionId(self) -> int:  # noqa: N802 - Spark's
        return self._index

    def getTaskInfos(self) -> list[Any]:  # noqa: N802 - Spark's
        return [SimpleNamespace(address="127.0.0.1:0")] * self._round.parties

    def resources(self) -> dict[str, Any]:
        return {}

    def allGather(self, text: str) -> list[str]:  # noqa: N802 - Spark's
        self.rounds += 1
        self._texts[self._index] = text
        self._round.wait(20)
        found = [self._texts[index] for index in range(self._round.parties)]
        self._round.wait(20)
        return found


def test_no_one_waits_for_a_second_round_with_a_task_that_refused() -> None:
    plan = TaskPlan(
        workers_per_task=1,
        job_id="job",
        secret=new_secret(),
        driver_addresses=(),
        env={},
        executable=None,
        as_horovod=False,
        versions=Versions.here(),
    )
    round_, texts = threading.Barrier(2), dict[int, str]()
    willing, refusing = Task(0, round_, texts), Task(1, round_, texts)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        refused = pool.submit(handshake.exchange, refusing, TaskHandshake(slot=1, problem="no room"))
        handshakes = handshake.exchange_all(willing, plan, stack)
        assert refused.result() == handshakes
    assert willing.rounds == 1
    assert handshake.check_handshakes(plan, handshakes) == (["no room"], [])
