"""Hangs of every kind, injected into one job one by one: each report names the rank, the tensor and the line."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_cluster.launch import local

#: For more hangs, with the times of a real job: HANGS=100 CHECK_TIME_S=10 SEED=1 pytest -m slow FILE
NUM_HANGS = int(os.environ.get("HANGS", "14"))
SEED = int(os.environ.get("SEED", "1"))
CHECK_S = int(os.environ.get("CHECK_TIME_S", "1"))
SHUTDOWN_S = CHECK_S + 3
#: When a hang is reported at the latest. A check time of a second or two is shorter than the time that ranks have for
#: their replies: 5 s for the root, and 2 s for the others.
REPORT_S = max(3 * CHECK_S, CHECK_S + 7)
#: What the report quotes of the victim; a stopped process cannot reply, so there it is the line of those that wait.
LINES = {
    "skips a call": 'hvd.allreduce(tensor, name=f"next.{number}")',
    "takes another branch": 'hvd.allgather(tensor, name=f"branch.{number}")',
    "is stopped": 'hvd.allreduce(tensor, name=f"hang.{number}")',
    "waits for its loader": "for batch in loader:",
    "sleeps": "time.sleep(duration_s)",
    "waits for a lock": "lock.acquire(timeout=duration_s)",
    "has a device that hangs": "time.sleep(device_s)",
}


class TimedOutput(io.StringIO):
    """What the workers write, and when each line came."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        self.lines.append((time.time(), text))
        return super().write(text)


def inject(hangs: list[tuple[str, int]], seed: int, shutdown_s: int) -> list[tuple[str, float, float]]:
    """Run in each rank: for each hang the error that ended it, when the rank began to wait, and when the error came."""
    import controlled_device

    import hvd_cluster.torch as hvd

    duration_s = shutdown_s + 4.0
    has_device_hung = False
    controlled_device.install(lambda _: not has_device_hung)

    class Slow(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(duration_s)
            return index

    def hang(kind: str, number: int, tensor: torch.Tensor) -> None:
        if kind == "skips a call":
            hvd.allreduce(tensor, name=f"next.{number}")
        elif kind == "takes another branch":
            hvd.allgather(tensor, name=f"branch.{number}")
        elif kind == "is stopped":
            subprocess.Popen(["sh", "-c", f"sleep {duration_s}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "waits for its loader":
            loader = torch.utils.data.DataLoader(Slow())
            for batch in loader:
                assert batch is not None
        elif kind == "sleeps":
            time.sleep(duration_s)
        elif kind == "waits for a lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=duration_s)

    errors = []
    for number, (kind, victim) in enumerate(hangs):
        hvd.init()
        generator = random.Random(f"{seed} {number}")
        tensor = torch.ones(generator.choice([1, 1000, 1_000_000]))
        for step in range(generator.randrange(3)):
            hvd.allreduce(tensor, name=f"step.{step}")
        is_device = kind == "has a device that hangs"
        has_device_hung = is_device and hvd.rank() == victim
        begun_s = 0.0
        try:
            if hvd.rank() == victim and not is_device:
                hang(kind, number, tensor)
            begun_s = time.time()
            hvd.allreduce(tensor, name=f"hang.{number}")
            if is_device:
                device_s = duration_s
                time.sleep(device_s)
            hvd.allreduce(tensor, name="after")
            errors.append(("", begun_s, time.time()))
        except hvd.HorovodInternalError as error:
            errors.append((str(error), begun_s, time.time()))
        has_device_hung = False
        hvd.shutdown()
        if hvd.rank_of_job == 0:  # type: ignore[attr-defined]
            time.sleep(0.5)  # what the other ranks have written comes first
            print(f"=== {number}", flush=True)
    return errors


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_report_of_each_hang_names_rank_tensor_and_line_and_every_rank_gets_an_error() -> None:
    kinds = list(LINES)
    # Each kind with each rank in turn.
    hangs = [(kinds[i % len(kinds)], (i + i // len(kinds) + SEED) % 3) for i in range(NUM_HANGS)]

    def fn(inject: Callable[..., list[tuple[str, float, float]]]) -> list[tuple[str, float, float]]:
        import hvd_cluster.torch as hvd

        hvd.rank_of_job = int(os.environ["HOROVOD_RANK"])  # type: ignore[attr-defined]
        return inject(hangs, SEED, SHUTDOWN_S)

    output = TimedOutput()
    env = {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(CHECK_S),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(SHUTDOWN_S),
    }
    results = local.run(fn, (inject,), num_proc=3, env=env, stdout=output, stderr=output)
    reports = re.split(r"=== \d+\n", output.getvalue())
    wrong = []
    for number, (kind, victim) in enumerate(hangs):
        ends = [result[number][0] for result in results]
        # If rank 0 is stopped, the error that ends the job may come before the first warning.
        end, begun_s, ended_s = results[victim - 1][number]
        report = reports[number] + end
        naming = re.compile(rf"\[[^\]]*allreduce\.hang\.{number}[,\]]")
        missing = re.search(rf"{victim}!?: \[|rank {victim} on \S+ does not answer", report)
        after_s = min([at_s for at_s, line in output.lines if naming.search(line)] + [ended_s]) - begun_s
        if not (naming.search(report) and missing and LINES[kind] in report and all(ends) and after_s < REPORT_S):
            wrong.append(f"hang {number}: rank {victim} {kind}, reported after {after_s:.1f} s\n{report}\n{ends}")
    assert not wrong, f"{len(wrong)} of {NUM_HANGS} hangs:\n" + "\n\n".join(wrong)
