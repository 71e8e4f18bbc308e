"""What the monitor costs: steps of the MLP and of the transformer of ``training_step`` with and without it, in turns.

Each turn starts a new world and is long enough for a report at the default rate. Turns without the monitor are compared
with others without it too: what differs there is the machine's. Rows of CPU time are of rank 0's process, all threads.
Every rank keeps its step times in any case; what this costs is measured by itself.
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

TURNS = 6
NUM_STEPS = {"MLP": 250, "transformer": 45}
CONTENDERS = {"without": "0", "again without": "0", "with": "1"}


def worker(what: str) -> dict[str, list[float]]:
    """Seconds per step of each contender, turn by turn, of the wall clock and of the CPU."""
    import hvd_cluster.torch as hvd

    make, loss_of = model_and_loss(what)
    times: dict[str, list[float]] = {f"{name}, {clock}": [] for name in CONTENDERS for clock in ("wall", "CPU")}
    for turn in range(TURNS + 1):
        names = [*CONTENDERS] * 2
        for name in names[turn % 3 : turn % 3 + 3]:
            os.environ["HOROVOD_MONITOR"] = CONTENDERS[name]
            hvd.init()
            model = make()
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
            for step in range(-3, NUM_STEPS[what]):
                if step == 0:
                    hvd.barrier()
                    start_s, start_cpu_s = time.perf_counter(), time.process_time()
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            if turn:
                times[f"{name}, wall"].append((time.perf_counter() - start_s) / NUM_STEPS[what])
                times[f"{name}, CPU"].append((time.process_time() - start_cpu_s) / NUM_STEPS[what])
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
    rows = []
    for what in NUM_STEPS:
        times = local.run(worker, (what,), num_proc=2, env={"OMP_NUM_THREADS": "1"}, verbose=0)[0]
        for clock in ("wall", "CPU"):
            for peer in ("again without", "with"):
                pair = {"ours": times[f"without, {clock}"], "peer": times[f"{peer}, {clock}"]}
                rows.append(row(f"a step of the {what}, {clock} time: without the monitor, and {peer} it", pair))
    table = Table(
        "A training step on 2 ranks, without the monitor (ours), again without it, and with it", "the other", rows
    )
    cost = [["a step, with two spans and a wait", f"{clock_cost_s() * 1e6:.1f} us"]]
    return Reports([table, Report("The clock that every rank keeps", ["bookkeeping", "time"], cost)])
