"""Elastic jobs on real processes of this host: its names are hosts of one slot or more each."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvd_cluster
from hvd_cluster.engine.timeline.trace import read
from hvd_cluster.errors import LaunchError, WorkerFailedError

HVDRUN = [sys.executable, "-m", "hvd_cluster.launch.cli.main"]
TRAIN = Path(__file__).with_name("scripts") / "train.py"
EPOCHS = 2


class Job:
    """An hvdrun in a folder of its own, whose discovery script prints what ``hosts`` says."""

    def __init__(
        self, folder: Path, hosts: str, *flags: str, pause_s: float = 0.05, command: list[str] | None = None
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.set_hosts(hosts)
        line = [*HVDRUN, "--verbose", "--host-discovery-script", f"cat {folder}/hosts", *flags]
        line += command or [sys.executable, str(TRAIN), str(folder), str(EPOCHS), str(pause_s)]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def set_hosts(self, hosts: str) -> None:
        """What the script prints from now on."""
        temporary = self.folder / "hosts.new"
        temporary.write_text(hosts.replace(",", "\n") + "\n")
        temporary.rename(self.folder / "hosts")

    def workers(self) -> dict[int, tuple[int, int, int]]:
        """Process id -> (step, rank, size), of those that live."""
        found = {}
        for note in self.folder.glob("pid.*"):
            pid = int(note.name.removeprefix("pid."))
            if Path(f"/proc/{pid}").exists():
                step, rank, size = map(int, note.read_text().split()[:3])
                found[pid] = (step, rank, size)
        return found

    def wait_for(self, condition: Any, timeout_s: float = 60.0) -> None:
        """Wait until ``condition(workers)`` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.workers()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.02)

    def hurry(self) -> None:
        """Let the workers pause no more."""
        (self.folder / "hurry").touch()

    def kill(self, rank: int, from_step: int = 3) -> None:
        """``kill -9`` to the worker of ``rank`` once it has taken that many steps."""
        self.wait_for(lambda workers: any(r == rank and s >= from_step for s, r, _ in workers.values()))
        pid = next(pid for pid, (s, r, _) in self.workers().items() if r == rank and s >= from_step)
        os.kill(pid, signal.SIGKILL)

    def kill_unless_over(self, pid: int, last_step: int) -> bool:
        """``kill -9`` to a worker, but not to rank 0 where no step is before it; whether it was killed.

        Once another has finished there is nobody to go on from, and a job that loses its rank 0 then fails
        (docs/elastic.md); amid the steps the others need it. Stopped first, it takes none between question and kill.
        """
        try:
            os.kill(pid, signal.SIGSTOP)
            while psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.001)
            step, rank, _ = self.workers()[pid]
            is_killed = rank != 0 or step < last_step
            os.kill(pid, signal.SIGKILL if is_killed else signal.SIGCONT)
        except (ProcessLookupError, psutil.NoSuchProcess, KeyError):  # it has ended by itself
            return False
        return is_killed

    def end(self, timeout_s: float = 90.0) -> dict[str, Any]:
        """The end of a job that succeeds."""
        try:
            assert self.process.wait(timeout_s) == 0, self.log.read_text()
        finally:
            self.process.kill()
            self.process.wait()
        end: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        return end

    def refusal(self, timeout_s: float = 60.0) -> str:
        """What a job that fails says."""
        try:
            assert self.process.wait(timeout_s) != 0
        finally:
            self.process.kill()
            self.process.wait()
        return self.log.read_text()


def each_sample_once_per_epoch(end: dict[str, Any]) -> bool:
    return Counter(map(tuple, end["seen"])) == Counter(
        (epoch, sample) for epoch in range(EPOCHS) for sample in range(64)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a run of two workers that nobody disturbs."""
    return Job(tmp_path_factory.mktemp("undisturbed"), "localhost:1,127.0.0.1:1", "-np", "2", pause_s=0.0).end()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_replaced_changes_nothing(rank: int, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", "--blacklist-cooldown-range", "1", "1")
    job.kill(rank)
    end = job.end()
    assert end["weights"] == undisturbed["weights"]
    assert end["seen"] == undisturbed["seen"]
    assert set(end["sizes"]) == {2}
    assert "restart: generation 1 has 2 workers, 1 of them new" in job.log.read_text()


def test_the_job_continues_with_fewer_workers_and_takes_those_that_come(tmp_path: Path) -> None:
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1", "--max-np", "2", pause_s=1.0)
    job.kill(0)
    job.wait_for(lambda workers: any(size == 1 for _, _, size in workers.values()))
    job.set_hosts("127.0.0.1:1,127.0.0.2:1")
    job.wait_for(lambda workers: sum(size == 2 for _, _, size in workers.values()) == 2)
    job.hurry()
    end = job.end()
    assert [size for size, before in zip(end["sizes"], [0, *end["sizes"]], strict=False) if size != before] == [2, 1, 2]
    assert each_sample_once_per_epoch(end)


@pytest.mark.slow
def test_workers_of_a_host_that_discovery_drops_leave_between_two_steps(tmp_path: Path) -> None:
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1", pause_s=0.1)
    job.wait_for(lambda workers: any(step >= 3 for step, _, _ in workers.values()))
    job.set_hosts("localhost:1")
    end = job.end()
    log = job.log.read_text()
    assert each_sample_once_per_epoch(end)
    assert set(end["sizes"]) == {1, 2}
    assert "back to the last commit" not in log  # nobody lost a step
    assert re.search(r"resize: generation 1 has 1 workers, 0 of them new", log)


@pytest.mark.slow
def test_the_last_worker_with_the_state_continues_where_its_host_has_failed(tmp_path: Path) -> None:
    job = Job(tmp_path, "localhost:2", "-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1", pause_s=0.1)
    job.kill(1)
    end = job.end()
    assert each_sample_once_per_epoch(end)
    assert end["sizes"][0] == 2
    assert 1 in end["sizes"]


@pytest.mark.slow
def test_too_few_workers_for_too_long_end_the_job_with_what_it_lacks(tmp_path: Path) -> None:
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "2", "--elastic-timeout", "2")
    job.kill(1)
    told = job.refusal()
    assert "waiting: 2 workers needed, 1 ready, 1 slots usable" in told
    assert "Timed out waiting for minimum number of slots to become available" in told
    assert "127.0.0.1 is excluded" in told
    assert "The first worker that failed:\n\nRank 1 on host 127.0.0.1 was killed by signal 9" in told


def test_an_error_of_the_function_s_own_does_not_reset_forever(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch\n"
        "import hvd_cluster.torch as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    hvd.allreduce(torch.ones(2 + hvd.rank()), name='grows')\n"
        "train(hvd.elastic.TorchState(epoch=0))\n"
    )
    job = Job(tmp_path / "job", "localhost:2", "-np", "2", command=[sys.executable, str(script)])
    told = job.refusal()
    assert "Mismatched ALLREDUCE tensor shapes" in told
    assert told.count("restart: generation") == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_survives_the_launcher(number: int, tmp_path: Path) -> None:
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", pause_s=0.2)
    try:
        job.wait_for(lambda workers: len(workers) == 2)
        pids = set(job.workers())
        job.process.send_signal(number)
        job.process.wait(30)
    finally:
        job.process.kill()
        job.process.wait()
    deadline_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.slow
def test_a_reset_limit_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1", "--reset-limit", "0")
    job.kill(0)
    assert "number of resets during elastic job exceeded limit: 0" in job.refusal()


def test_a_program_that_fails_everywhere_ends_the_job_with_its_own_words(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo what went wrong; exit 7"]
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", command=command)
    told = job.refusal()
    assert job.process.returncode == 7
    assert "excluded permanently after a failure" in told
    assert told.endswith("what went wrong\n")


def test_a_discovery_script_that_fails_at_first_is_refused(tmp_path: Path) -> None:
    line = [*HVDRUN, "-np", "1", "--host-discovery-script", "echo nobody home >&2; exit 3", "true"]
    result = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "ended with exit code 3: nobody home" in result.stderr


def test_a_function_returns_its_values_by_rank_and_an_error_is_its_own(tmp_path: Path) -> None:
    def fn(base: int) -> tuple[int, int]:
        import hvd_cluster.torch as hvd

        hvd.init()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, total=hvd.rank())

        @hvd.elastic.run
        def train(state: Any) -> tuple[int, int]:
            state.commit()
            return base + hvd.rank(), state.total

        return train(state)

    script = f"{tmp_path}/hosts.sh"
    Path(script).write_text("echo localhost:1; echo 127.0.0.1\n")
    ran = hvd_cluster.run(fn, (10,), num_proc=2, host_discovery_script=f"sh {script}", verbose=0)
    assert ran == [(10, 0), (11, 0)]

    def wrong() -> None:
        raise ValueError("my own")

    with pytest.raises(WorkerFailedError, match="ValueError: my own"):
        hvd_cluster.run(wrong, min_num_proc=1, hosts="localhost:1,127.0.0.1:1", verbose=0)
    with pytest.raises(LaunchError, match="cannot be discovered"):
        hvd_cluster.run(wrong, min_num_proc=1, host_discovery_script="exit 1", verbose=0)


def test_what_a_worker_raised_is_logged_although_the_job_continues(caplog: pytest.LogCaptureFixture) -> None:
    def fn() -> int:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        state = hvd.elastic.TorchState(steps=0)

        @hvd.elastic.run
        def train(state: Any) -> int:
            while hvd.size() > 1:
                if hvd.rank() == 1:
                    raise ValueError("my own")
                hvd.allreduce(torch.ones(1), name="one")
            return hvd.size()

        return train(state)

    assert hvd_cluster.run(fn, num_proc=2, min_num_proc=1, hosts="localhost:1,127.0.0.1:1", verbose=0) == [1]
    (text,) = (text for text in caplog.messages if "raised ValueError" in text)
    assert text.startswith("rank 1 on host 127.0.0.1 raised ValueError:\nTraceback (most recent call last):\n")
    assert text.endswith("\nValueError: my own")


def test_an_error_that_ends_the_last_world_is_told_although_newcomers_start_elsewhere() -> None:
    def wrong() -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        time.sleep(hvd.rank())  # the first failure has a newcomer started on the other host
        raise ValueError("my own")

    with pytest.raises(WorkerFailedError) as raised:
        hvd_cluster.run(wrong, num_proc=2, min_num_proc=2, max_num_proc=2, hosts="localhost:2,127.0.0.1:2", verbose=0)
    assert str(raised.value).startswith("Traceback")
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.slow
def test_the_job_fails_with_rank_0_however_the_others_end_later(tmp_path: Path) -> None:
    script = tmp_path / "end.py"
    script.write_text(
        "import sys, time\n"
        "import hvd_cluster.torch as hvd\n"
        "hvd.init()\n"
        "hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))\n"
        "rank = hvd.rank()\n"
        "hvd.shutdown()\n"
        "if rank == 0:\n"
        "    sys.exit('the folder for the model is missing')\n"
        "time.sleep(1.5)\n"
    )
    job = Job(tmp_path / "job", "localhost:2", "-np", "2", command=[sys.executable, str(script)])
    told = job.refusal()
    assert job.process.returncode == 1
    assert "the folder for the model is missing" in told
    assert "rank 1 has finished" in told


@pytest.mark.slow
@pytest.mark.parametrize("all_may_skip", [True, False])
def test_ranks_skip_the_synchronization_after_a_reset_only_together(all_may_skip: bool) -> None:
    def fn(all_may_skip: bool) -> list[tuple[int, int]]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.errors import HorovodInternalError, HostsUpdatedInterrupt

        hvd.init()
        worlds = 0

        @hvd.elastic.run
        def train(state: Any) -> list[tuple[int, int]]:
            nonlocal worlds
            worlds += 1
            if worlds == 1:
                state.value = hvd.rank() + 5  # not committed
                if all_may_skip or hvd.rank() == 0:
                    raise HostsUpdatedInterrupt(skip_sync=True)
                raise HorovodInternalError("rank 2 died while rank 1 waited for the result that rank 0 has")
            found: list[tuple[int, int]] = hvd.allgather_object((hvd.rank(), state.value))
            return found

        return train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, value=1))

    ran = hvd_cluster.run(fn, (all_may_skip,), num_proc=2, min_num_proc=2, hosts="localhost:1,127.0.0.1:1", verbose=0)
    assert ran == [[(0, 5), (1, 6 if all_may_skip else 5)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_next_world_is_joined_with_the_arguments_of_init(is_dynamic: bool) -> None:
    def fn(is_dynamic: bool) -> list[float]:
        import torch

        import hvd_cluster.torch as hvd
        from hvd_cluster.errors import HostsUpdatedInterrupt

        mine = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
        hvd.init(process_sets="dynamic" if is_dynamic else mine)
        sums = []

        @hvd.elastic.run
        def train(state: Any) -> list[float]:
            for each in mine if is_dynamic else ():
                hvd.add_process_set(each)
            each = mine[hvd.rank()]
            sums.append(float(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum, process_set=each)))
            hvd.barrier()  # a rank that leaves earlier would end the other one's allreduce
            if len(sums) == 1:
                raise HostsUpdatedInterrupt
            return sums

        return train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))

    ran = hvd_cluster.run(fn, (is_dynamic,), num_proc=2, min_num_proc=2, hosts="localhost:1,127.0.0.1:1", verbose=0)
    assert ran == [[1.0, 1.0], [2.0, 2.0]]


def test_each_world_has_its_own_timeline_and_autotune_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "run.json"))
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_AUTOTUNE_LOG", str(tmp_path / "tuning.csv"))

    def fn() -> None:
        import torch

        import hvd_cluster.torch as hvd
        from hvd_cluster.errors import HostsUpdatedInterrupt

        hvd.init()

        @hvd.elastic.run
        def train(state: Any) -> None:
            state.world += 1
            hvd.allreduce(torch.ones(1), name=f"in_world_{state.world}")
            if state.world == 0:
                raise HostsUpdatedInterrupt

        train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, world=-1))
        hvd.shutdown()

    hvd_cluster.run(fn, num_proc=2, min_num_proc=2, hosts="localhost:1,127.0.0.1:1", verbose=0)
    for world, suffix in ((0, ""), (1, ".generation-1")):
        tracks = {span.track for span in read(tmp_path / f"run{suffix}.json").spans}
        assert {track for track in tracks if "in_world" in track} == {f"allreduce.in_world_{world}"}
        assert (tmp_path / f"tuning{suffix}.csv").read_text().startswith("hierarchical_allreduce,")


def test_a_job_ends_if_its_state_is_lost_before_a_new_worker_has_received_it(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")

    def fn() -> int:
        import hvd_cluster.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def train(state: Any) -> int:
            while state.step < 3 or state.is_first:
                hosts.write_text("localhost:1\n127.0.0.1:1\n")
                time.sleep(0.1)
                state.step += 1
                state.commit()
            return int(state.step)

        is_first = len(hosts.read_text().splitlines()) == 1
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, is_first=is_first)
        # The worker that has trained dies when the new one waits for the state.
        state.register_reset_callbacks([lambda: os.kill(os.getpid(), signal.SIGKILL) if state.step else None])
        return train(state)

    with pytest.raises(LaunchError, match="all workers that held the state of the job have ended"):
        hvd_cluster.run(fn, num_proc=1, min_num_proc=1, max_num_proc=2, host_discovery_script=f"cat {hosts}", verbose=0)


@pytest.mark.slow
def test_an_error_after_the_training_fails_the_job_and_one_that_was_made_good_does_not() -> None:
    def fn(fault: str) -> int:
        import hvd_cluster.torch as hvd

        hvd.init()

        @hvd.elastic.run
        def train(state: Any) -> int:
            if fault == "in training" and hvd.size() == 2:
                if hvd.rank() == 1:
                    time.time = lambda now=time.time: now() + 3600  # the clock of its host is ahead
                    sys.exit(4)
                hvd.barrier()
            return int(hvd.size())

        size = train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
        rank = hvd.rank()
        hvd.shutdown()
        if fault == f"rank {rank}":
            raise OSError("no space left")
        time.sleep(1.0)
        return size

    def run(fault: str) -> list[int]:
        results: list[int] = hvd_cluster.run(
            fn, (fault,), num_proc=2, min_num_proc=1, max_num_proc=2, hosts="localhost:1,127.0.0.1:1", verbose=0
        )
        return results

    assert run("in training") == [1]
    for fault in ("rank 0", "rank 1"):
        with pytest.raises(WorkerFailedError, match="no space left"):
            run(fault)


def test_the_first_worker_of_a_host_leaves_cores_to_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")

    def fn() -> tuple[int, int]:
        return int(os.environ["HOROVOD_LOCAL_SIZE"]), int(os.environ["OMP_NUM_THREADS"])

    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    two_names = hvd_cluster.run(fn, num_proc=2, min_num_proc=2, hosts="localhost:1,127.0.0.1:1", verbose=0)
    many_slots = hvd_cluster.run(
        fn, num_proc=2, min_num_proc=2, max_num_proc=2, host_discovery_script="echo localhost:4", verbose=0
    )
    assert two_names == many_slots == [(2, threads)] * 2


@pytest.mark.slow
def test_a_worker_of_an_elastic_job_starts_a_job_of_its_own() -> None:
    def inner() -> tuple[int, int]:
        import hvd_cluster.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size()

    def fn() -> list[tuple[int, int]]:
        import hvd_cluster.torch as hvd

        hvd.init()
        inner_job: list[tuple[int, int]] = hvd_cluster.run(inner, num_proc=2, verbose=0)
        return inner_job

    ran = hvd_cluster.run(fn, min_num_proc=1, host_discovery_script="echo localhost:1", verbose=0)
    assert ran == [[(0, 2), (1, 2)]]


def test_workers_end_at_once_whatever_the_discovery_script_waits_for(tmp_path: Path) -> None:
    note = f"{tmp_path}/pid.$$"
    command = ["sh", "-c", f"echo 0 0 2 > {tmp_path}/new.$$; mv {tmp_path}/new.$$ {note}; exec sleep 60"]
    job = Job(tmp_path, "localhost:2", "-np", "2", command=command)
    try:
        job.wait_for(lambda workers: len(workers) == 2)
        pids = set(job.workers())
        (tmp_path / "hosts").unlink()
        os.mkfifo(tmp_path / "hosts")  # the script waits until somebody writes
        time.sleep(1.5)
        job.process.terminate()
        began_s = time.monotonic()
        job.process.wait(30)
        took_s = time.monotonic() - began_s
    finally:
        job.process.kill()
        job.process.wait()
    assert took_s < 15, job.log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_a_member_that_hangs_holds_the_job_up_no_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC_LEAVE_TIMEOUT", "3")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "4")
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "2")
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "5")
    job = Job(tmp_path, "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1", "--max-np", "2", pause_s=0.2)
    job.wait_for(lambda workers: any(r == 1 and s >= 3 for s, r, _ in workers.values()))
    os.kill(next(pid for pid, (_, rank, _) in job.workers().items() if rank == 1), signal.SIGSTOP)
    job.wait_for(lambda _: "HOROVOD_ELASTIC_LEAVE_TIMEOUT" in job.log.read_text())
    job.hurry()
    assert each_sample_once_per_epoch(job.end())


@pytest.mark.slow
def test_a_worker_that_is_ready_while_the_others_still_meet_is_let_in(tmp_path: Path) -> None:
    def fn(folder: str) -> int:
        import hvd_cluster.torch as hvd
        from hvd_cluster.elastic.loop import run_fn
        from hvd_cluster.engine.basics import rejoin

        hvd.init()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, worlds=1)

        def train(state: Any) -> int:
            if hvd.rank() == 1 and state.worlds == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state.worlds += 1
            deadline_s = time.monotonic() + 60
            while not (hvd.size() == 2 and state.worlds > 2) and time.monotonic() < deadline_s:
                time.sleep(0.2)
                state.commit()
            return int(hvd.size())

        def meet_slowly() -> None:
            rejoin()
            if hvd.size() == 1:
                Path(folder, "hosts").write_text("localhost:1\n127.0.0.1:1\n127.0.0.2:1\n")
                time.sleep(15)  # the new worker is there by then, and the driver says so

        return run_fn(train, meet_slowly)(state)

    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    ran = hvd_cluster.run(
        fn,
        (str(tmp_path),),
        num_proc=2,
        min_num_proc=1,
        max_num_proc=2,
        host_discovery_script=f"cat {tmp_path}/hosts",
        verbose=0,
    )
    assert ran == [2, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(6))
def test_however_the_workers_change_each_sample_counts_once(turn: int, tmp_path: Path) -> None:
    """Sizes 1, 2 and 4 divide what is left of 64 samples in batches of 4: nothing has to be dealt twice."""
    chance = random.Random(turn)
    names = [f"127.0.0.{number}" for number in range(1, 5)]
    flags = ["-np", "2", "--min-np", "1", "--max-np", "4", "--blacklist-cooldown-range", "1", "2"]
    job = Job(tmp_path, ",".join(f"{name}:1" for name in names), *flags, pause_s=0.3)
    deadline_s = time.monotonic() + 40
    while job.process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(chance.uniform(0.3, 2.0))
        # The worker of a host that is always there lives: whoever else has the state may be on the way out.
        mortal = [pid for pid in sorted(job.workers()) if names[0] not in (tmp_path / f"pid.{pid}").read_text().split()]
        if mortal and chance.random() < 0.6:
            os.kill(chance.choice(mortal), signal.SIGKILL)
        else:
            present = chance.sample(names, k=chance.choice((2, 4)))
            job.set_hosts(",".join(f"{name}:1" for name in sorted({*present, names[0]})))
    job.set_hosts(",".join(f"{name}:1" for name in names))
    end = job.end(120)
    counts = Counter(map(tuple, end["seen"]))
    assert set(counts) == {(epoch, sample) for epoch in range(EPOCHS) for sample in range(64)}
    if 3 not in end["sizes"]:
        assert set(counts.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_runs_with_kills_at_random_moments_end_well(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    random.seed(os.environ.get("HVD_TEST_SEED", "5"))
    flags = ["-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "1", "1", "--elastic-timeout", "60"]
    num_steps = len(undisturbed["sizes"])
    for turn in range(50):
        job = Job(tmp_path / str(turn), "localhost:1,127.0.0.1:1", *flags, pause_s=0.03)
        killed: set[int] = set()  # on a busy machine they are still there for a while
        for _ in range(random.choice((1, 2))):
            job.wait_for(lambda workers: workers)
            time.sleep(random.uniform(0.0, 1.0))
            living = sorted(job.workers().keys() - killed)
            if len(living) > 1:  # the state is with somebody else
                victim = random.choice(living)
                if job.kill_unless_over(victim, num_steps):
                    killed.add(victim)
        end = job.end(150)
        assert end["weights"] == undisturbed["weights"], turn
        assert each_sample_once_per_epoch(end), turn
