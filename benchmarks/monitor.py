"""What the monitor costs: steps of the MLP and of the transformer of ``training_step`` with and without it, in turns.

Each turn starts a new world. The monitor samples, reports and writes a line every second, five times as often as by
default. Every rank keeps its step times in any case; what this costs is measured by itself.
"""

from __future__ import annotations

import os
import time

import torch

from benchmarks.measure import Table, row
from benchmarks.report import Report, Reports
from benchmarks.training_step import model_and_loss
from hvd_cluster.launch import local
from hvd_cluster.monitor.step_clock import DATA, OPTIMIZER, StepClock

TURNS = 40
NUM_STEPS = {"MLP": 40, "transformer": 12}


def worker(what: str) -> dict[str, list[float]]:
    """Seconds per step without ("ours") and with the monitor ("peer"), turn by turn."""
    import hvd_cluster.torch as hvd

    make, loss_of = model_and_loss(what)
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(TURNS + 1):
        contenders = [("ours", "0"), ("peer", "1")]
        for name, is_monitored in contenders[:: 1 if turn % 2 else -1]:
            os.environ["HOROVOD_MONITOR"] = is_monitored
            hvd.init()
            model = make()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
            for step in range(-3, NUM_STEPS[what]):
                if step == 0:
                    hvd.barrier()
                    start_s = time.perf_counter()
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            if turn:
                times[name].append((time.perf_counter() - start_s) / NUM_STEPS[what])
            hvd.shutdown()
    return times


def clock_cost_s(num_steps: int = 20_000) -> float:
    """Seconds of one step's bookkeeping: a wait for data, one for the gradients, and the optimizer."""
    clock = StepClock()
    start_s = time.perf_counter()
    for _ in range(num_steps):
        clock.leave(clock.enter(DATA))
        clock.note_wait(0.0, 1.0)
        clock.leave(clock.enter(OPTIMIZER))
        clock.end_step()
    return (time.perf_counter() - start_s) / num_steps


def measure() -> Reports:
    env = {"OMP_NUM_THREADS": "1", "HOROVOD_MONITOR_INTERVAL_SECONDS": "1"}
    rows = []
    for what in NUM_STEPS:
        ranks = local.run(worker, (what,), num_proc=2, env=env, verbose=0)
        rows.append(row(f"a step of the {what}, 2 ranks", ranks[0]))
    table = Table("A training step without the monitor (ours) and with it", "with the monitor", rows)
    cost = [["a step, with two spans and a wait", f"{clock_cost_s() * 1e6:.1f} us"]]
    return Reports([table, Report("The clock that every rank keeps", ["bookkeeping", "time"], cost)])
