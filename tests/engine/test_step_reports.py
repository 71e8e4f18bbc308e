"""The monitor of a job: what rank 0 writes about the steps of all ranks."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from hvd_cluster.engine.step_reports import next_beat
from hvd_cluster.launch import local
from hvd_cluster.monitor.step_clock import ACTIVITIES

ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_MONITOR_INTERVAL_SECONDS": "0.2"}


def train(late_rank: int, num_steps: int = 12) -> list[tuple[float, ...]]:
    """A short job in which one rank is late; the times of its steps."""
    import hvd_cluster.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    for _ in range(num_steps):
        optimizer.zero_grad()
        if hvd.rank() == late_rank:
            time.sleep(0.06)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    times = [tuple(step) for step in hvd.step_times()]
    hvd.shutdown()
    return times


@pytest.mark.parametrize(("now_s", "due_s"), [(10.0, 15.0), (12.4, 15.0), (12.6, 20.0), (15.2, 20.0), (31.0, 35.0)])
def test_late_reports_do_not_shift_those_that_follow(now_s: float, due_s: float) -> None:
    assert next_beat(10.0, 5.0, now_s) == due_s


@pytest.mark.parametrize("shares", ["1", "0"], ids=["ballot", "tree"])
def test_rank_0_writes_lines_and_a_table_that_name_the_late_rank_and_its_line(
    shares: str, capfd: pytest.CaptureFixture[str]
) -> None:
    local.run(train, (2, 40), num_proc=3, env={**ENV, "HOROVOD_MONITOR": "1", "HOROVOD_SHARED_MEMORY": shares})
    lines = [line.partition("[monitor] ")[2] for line in capfd.readouterr().err.splitlines() if "[monitor]" in line]
    assert any(line.startswith("step ") and "Rank 2 on 127.0.0.1 was last in" in line for line in lines)
    table = lines[lines.index("39 steps") :]
    assert [line.split()[1] for line in table[2:5]] == ["0", "1", "2"]
    assert "the cause is forward and backward: it was in train (tests/engine/test_step_reports.py:" in table[5]


def scraped(port: int) -> dict[str, float]:
    """The metrics of a job whose rank 1 is late, read during training, when they say so."""
    import hvd_cluster.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    values: dict[str, float] = {}
    is_known = False
    while not is_known:
        optimizer.zero_grad()
        time.sleep(0.02 * hvd.rank())
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        if hvd.rank() == 0:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                lines = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
            values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
        is_known = hvd.broadcast_object(values.get('hvd_last_total{rank="1"}', 0) >= 5, root_rank=0)
    hvd.shutdown()
    return values


def test_the_metrics_of_a_running_job_are_those_of_all_its_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values, _ = local.run(scraped, (port,), num_proc=2, env={**ENV, "HOROVOD_METRICS_PORT": str(port)})
    assert values['hvd_steps_total{rank="0"}'] >= 5 <= values['hvd_steps_total{rank="1"}']
    seconds = [
        [values[f'hvd_step_seconds_total{{activity="{activity}",rank="{rank}"}}'] for activity in ACTIVITIES]
        for rank in (0, 1)
    ]
    assert [ACTIVITIES[each.index(max(each))] for each in seconds] == ["late", "compute"]
    assert 0 < values['hvd_host_usage{host="127.0.0.1",resource="cpu"}'] <= 100
    assert "[monitor]" not in capfd.readouterr().err


@pytest.mark.slow
def test_every_rank_has_its_step_times_without_a_monitor(capfd: pytest.CaptureFixture[str]) -> None:
    late, waiting = local.run(train, (0,), num_proc=2, env=ENV)
    assert len(late) == len(waiting) == 11
    late_times = [statistics.median(each) for each in zip(*late, strict=True)]
    waiting_times = [statistics.median(each) for each in zip(*waiting, strict=True)]
    assert late_times[1] > late_times[2]  # it computes
    assert waiting_times[2] > waiting_times[1]  # it waits for the late rank
    assert "[monitor]" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_job_of_one_rank_is_monitored_too(capfd: pytest.CaptureFixture[str]) -> None:
    local.run(train, (0,), num_proc=1, env={**ENV, "HOROVOD_MONITOR": "1"})
    err = capfd.readouterr().err
    assert "[monitor] 11 steps" in err
    assert "last in" not in err


@pytest.mark.slow
def test_a_monitor_that_cannot_write_or_count_does_not_end_the_job() -> None:
    def fn() -> int:
        import psutil

        from hvd_cluster.monitor.job_monitor import JobMonitor

        def broken(*_: object) -> None:
            raise RuntimeError

        sys.stderr = Path("/dev/full").open("w")  # noqa: SIM115 - it is the standard error of this process
        psutil.virtual_memory = broken
        JobMonitor.add = broken  # type: ignore[method-assign]
        return len(train(0, 40))

    assert local.run(fn, num_proc=2, env={**ENV, "HOROVOD_MONITOR": "1"}) == [39, 39]


@pytest.mark.slow
def test_hvdrun_has_a_flag_for_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_step_reports\ntest_step_reports.train(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", "--monitor", sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENV},
    )
    assert done.returncode == 0, done.stderr
    assert "[monitor] 11 steps" in done.stderr
    assert "Rank 1 on 127.0.0.1 was last in" in done.stderr
