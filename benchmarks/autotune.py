"""A training step with what autotune finds within 50 steps, with the defaults, and with a grid of parameters."""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks.measure import seconds
from benchmarks.report import Report, Reports
from hvd_cluster.launch import local

MIB = 1 << 20
GRID = [(threshold, cycle) for threshold in (0, 1, 8, 64) for cycle in (0.0, 1.0, 10.0)]
STEPS = 15
DEFAULTS = "the defaults, nothing set"
#: Rounds over the whole grid, the defaults and the tuned parameters, so that all meet the same disturbances.
ROUNDS = 3


def worker(log: str) -> dict[str, list[float]]:
    """Step times of every choice, several worlds in one process."""
    import copy
    import os
    from pathlib import Path

    import torch

    import hvd_cluster.torch as hvd

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    fresh = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    x = torch.randn(4, 32, 256)

    def steps(count: int, **knobs: str) -> float:
        os.environ.update({f"HOROVOD_{name}": value for name, value in knobs.items()})
        hvd.init()
        model = copy.deepcopy(fresh)  # an optimizer leaves its hooks on the parameters
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
        times = []
        for _ in range(count):
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - begin_s)
        hvd.shutdown()
        for name in knobs:
            del os.environ[f"HOROVOD_{name}"]
        return statistics.median(times[3:])

    steps(55, AUTOTUNE="1", AUTOTUNE_LOG=log)
    best = Path(log).read_text().splitlines()[-1].split(",")
    tuned = f"autotuned: {int(best[5]) / MIB:.2f} MiB, {float(best[4]):g} ms"
    choices = {tuned: {"FUSION_THRESHOLD": best[5], "CYCLE_TIME": best[4]}, DEFAULTS: {}}
    for threshold, cycle in GRID:
        knobs = {"FUSION_THRESHOLD": str(threshold * MIB), "CYCLE_TIME": str(cycle)}
        choices[f"{threshold} MiB, {cycle:g} ms"] = knobs
    found: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(ROUNDS):
        for name, knobs in choices.items():
            found[name].append(steps(STEPS, **knobs))
    return found


def measure() -> Reports:
    import tempfile

    parts = []
    for name, shared in (("shared memory", "1"), ("Gloo", "0")):
        with tempfile.NamedTemporaryFile(suffix=".csv") as log:
            env = {"OMP_NUM_THREADS": "1", "HOROVOD_SHARED_MEMORY": shared}
            found = local.run(worker, (log.name,), num_proc=2, env=env)[0]
        medians = {choice: statistics.median(times) for choice, times in found.items()}
        tuned, _, *grid = medians
        best = min(grid, key=lambda choice: medians[choice])
        worst = max(grid, key=lambda choice: medians[choice])
        rows = [[tuned, seconds(medians[tuned]), "1.00"]]
        rows.append([DEFAULTS, seconds(medians[DEFAULTS]), f"{medians[DEFAULTS] / medians[tuned]:.2f}"])
        for label, choice in (("best of the grid", best), ("worst", worst)):
            rows.append([f"{label}: {choice}", seconds(medians[choice]), f"{medians[choice] / medians[tuned]:.2f}"])
        parts.append(
            Report(f"Autotune, 2 ranks, {name}: a training step", ("parameters", "step", "step / autotuned"), rows)
        )
    return Reports(parts)


if __name__ == "__main__":
    sys.stdout.write(measure().markdown())
