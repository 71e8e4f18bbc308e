"""Functions on every worker, with each kind of session: results, output, failures. Real Spark, real processes."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import hvd_cluster.spark
from hvd_cluster.errors import LaunchError, NotEnoughSlotsError, StartTimeoutError, WorkerFailedError
from hvd_cluster.spark.devices import get_available_devices

pytestmark = pytest.mark.spark

#: Bounds of the issue and of the brief; everything here takes far less.
SURVIVORS_RAISE_S = 10.0


def _wait_for_file(path: Path, timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class _Reacting(io.StringIO):
    """A stream that creates a file when a text is written to it."""

    def __init__(self, text: str, path: Path) -> None:
        super().__init__()
        self._text, self._path = text, path

    def write(self, text: str) -> int:
        if self._text in text:
            self._path.touch()
        return super().write(text)


@pytest.mark.each_kind
def test_results_come_in_rank_order_and_each_worker_knows_its_place(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(base: int, *, names: list[str]) -> dict[str, Any]:
        return {
            "sum": base + int(os.environ["HOROVOD_RANK"]),
            "pid": os.getpid(),
            **{n: os.environ.get(n) for n in names},
        }

    monkeypatch.setenv("ONLY_ON_THE_DRIVER", "1")
    names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE", "RANK"]
    names += ["ONLY_ON_THE_DRIVER", "ADDED", "PYSPARK_PYTHON", "HOROVOD_GLOO_IFACE"]
    env = {"ADDED": "yes", "PYSPARK_PYTHON": None}
    results = hvd_cluster.spark.run(place, (10,), {"names": names}, num_proc=2, env=env, nics="lo")

    assert [result["sum"] for result in results] == [10, 11]
    assert len({result["pid"] for result in results} | {os.getpid()}) == 3
    for rank, result in enumerate(results):
        # Two executors on one machine are one host.
        assert [result[name] for name in names[:6]] == [str(rank), "2", str(rank), "2", "1", str(rank)]
        assert [result[name] for name in names[6:]] == [None, "yes", None, "lo"]


#: The defaults of Horovod's functions, as they are documented.
RUN = {
    "args": (),
    "kwargs": {},
    "num_proc": None,
    "start_timeout": None,
    "use_mpi": None,
    "use_gloo": None,
    "extra_mpi_args": None,
    "env": None,
    "stdout": None,
    "stderr": None,
    "verbose": 1,
    "nics": None,
    "prefix_output_with_timestamp": False,
    "executable": None,
}
RUN_ELASTIC = {
    "args": (),
    "kwargs": {},
    "num_proc": None,
    "min_num_proc": None,
    "max_num_proc": None,
    "start_timeout": None,
    "elastic_timeout": None,
    "reset_limit": None,
    "env": None,
    "stdout": None,
    "stderr": None,
    "verbose": 1,
    "nics": None,
    "prefix_output_with_timestamp": False,
    "min_np": None,
    "max_np": None,
}


@pytest.mark.spark("local")
@pytest.mark.parametrize(
    ("run", "defaults"), [(hvd_cluster.spark.run, RUN), (hvd_cluster.spark.run_elastic, RUN_ELASTIC)]
)
@pytest.mark.parametrize("given", ["defaults", "None"])
def test_horovods_defaults_and_none_say_nothing(spark: Any, run: Any, defaults: dict[str, Any], given: str) -> None:
    values: dict[str, Any] = defaults if given == "defaults" else dict.fromkeys(inspect.signature(run).parameters)
    values.pop("fn", None)
    assert run(int, **{**values, "num_proc": 1}) == [0]


def test_one_worker_per_slot_is_the_default(spark: Any, spark_slots: int) -> None:
    assert hvd_cluster.spark.run(lambda: os.environ["HOROVOD_SIZE"]) == [str(spark_slots)] * spark_slots


def test_output_and_events_reach_the_driver_while_the_workers_run(spark: Any, tmp_path: Path) -> None:
    heard, seen = tmp_path / "heard", tmp_path / "seen"

    def talk() -> list[bool]:
        import sys

        from hvd_cluster.launch.progress import report

        print("listen")
        print("déjà vu", file=sys.stderr)
        answers = [_wait_for_file(heard)]
        report(epoch=1, loss=0.5)
        return [*answers, _wait_for_file(seen)]

    events: list[tuple[int, dict[str, Any]]] = []

    def on_event(rank: int, fields: dict[str, Any]) -> None:
        events.append((rank, fields))
        if len(events) == 2:
            seen.touch()

    out, err = _Reacting("[1]<stdout>:listen", heard), io.StringIO()
    assert hvd_cluster.spark.run(talk, num_proc=2, stdout=out, stderr=err, on_event=on_event) == [[True, True]] * 2
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:listen", "[1]<stdout>:listen"]
    assert "[0]<stderr>:déjà vu\n" in err.getvalue()
    assert sorted(rank for rank, _ in events) == [0, 1]
    assert events[0][1] == {"epoch": 1, "loss": 0.5}


def test_output_goes_to_the_drivers_own_streams_by_default(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    hvd_cluster.spark.run(lambda: print("hello"), num_proc=1, prefix_output_with_timestamp=True)
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("[0]<stdout>:hello")
    assert captured.out[:2] == "20"


@pytest.mark.each_kind
def test_the_users_own_traceback_comes_first(spark: Any) -> None:
    def step(rank: int) -> None:
        if rank == 1:
            raise ValueError("a bad batch")
        time.sleep(60)

    def train() -> None:
        step(int(os.environ["HOROVOD_RANK"]))

    with pytest.raises(WorkerFailedError, match="Rank 1") as raised:
        hvd_cluster.spark.run(train, num_proc=2)
    text = str(raised.value)
    assert text.startswith("Traceback (most recent call last):")
    assert text.index("in train") < text.index("in step") < text.index("ValueError: a bad batch") < text.index("Rank 1")
    assert "org.apache" not in text
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, ValueError)


def test_nothing_of_a_job_stays_in_sparks_reused_python_workers(spark: Any) -> None:
    def mark() -> str | None:
        import builtins

        before = getattr(builtins, "mark_of_the_first_job", None) or os.environ.get("LEFT")
        builtins.mark_of_the_first_job = os.environ["LEFT"] = "left"
        return before

    assert [hvd_cluster.spark.run(mark, num_proc=2) for _ in range(2)] == [[None, None]] * 2


def test_plain_torch_distributed_runs_unchanged(spark: Any) -> None:
    def total() -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor.item()

    assert hvd_cluster.spark.run(total, num_proc=2) == [3.0, 3.0]


def test_the_group_of_torch_distributed_exists_if_asked_for(spark: Any) -> None:
    def total() -> tuple[str, float]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor)
        return dist.get_backend(), tensor.item()

    assert hvd_cluster.spark.run(total, num_proc=2, torch_backend="hvd") == [("hvd", 3.0)] * 2


def test_large_arguments_and_results_get_through(spark: Any) -> None:
    def digest(data: bytes) -> tuple[str, bytes]:
        rank = int(os.environ["HOROVOD_RANK"])
        return hashlib.sha256(data).hexdigest(), data * 12 if rank else b""

    data = os.urandom(3 << 20)
    results = hvd_cluster.spark.run(digest, (data,), num_proc=2)
    assert [digest for digest, _ in results] == [hashlib.sha256(data).hexdigest()] * 2
    assert results[1][1] == data * 12
    # The same content a second time: Connect keeps what was uploaded.
    assert hvd_cluster.spark.run(digest, (data,), num_proc=1)[0][0] == results[0][0]


def test_results_too_large_for_the_driver_are_not_the_death_of_a_worker(spark: Any, spark_master: str) -> None:
    if spark_master == "connect":
        pytest.skip("a client cannot change the server's own limit")
    settings = spark.sparkContext._jsc.sc().conf()
    before = settings.get("spark.driver.maxResultSize", "1g")
    settings.set("spark.driver.maxResultSize", "100k")
    try:
        with pytest.raises(LaunchError, match=r"All workers finished, but .* spark\.driver\.maxResultSize") as raised:
            hvd_cluster.spark.run(os.urandom, (1_000_000,), num_proc=2, verbose=0)
    finally:
        settings.set("spark.driver.maxResultSize", before)
    assert not isinstance(raised.value, WorkerFailedError)


def test_two_runs_at_once_from_two_threads(spark: Any, tmp_path: Path) -> None:
    def meet(me: str, other: str) -> bool:
        (tmp_path / me).touch()
        return _wait_for_file(tmp_path / other)

    met: dict[str, list[bool]] = {}

    def run(me: str, other: str) -> None:
        met[me] = hvd_cluster.spark.run(meet, (me, other), num_proc=1, spark=spark)

    threads = [threading.Thread(target=run, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == {"a": [True], "b": [True]}


@pytest.mark.each_kind
def test_killing_one_worker_during_a_collective_ends_the_others_and_the_run(spark: Any, tmp_path: Path) -> None:
    def train() -> None:
        import signal

        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        for step in range(100_000):
            if hvd.rank() == 1 and step == 20:
                (tmp_path / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                summed = hvd.allreduce(torch.ones(10_000), op=hvd.Sum, name="gradient")
            except hvd.HorovodInternalError:
                (tmp_path / "raised").write_text(str(time.time()))
                raise
            if summed[0] != 2:
                raise ValueError("a wrong sum")

    # Whether any shared memory is left, tests/plugins/leaks.py checks: it knows that of other jobs.
    with pytest.raises(WorkerFailedError, match=r"Rank 1 .* was killed by signal 9") as raised:
        hvd_cluster.spark.run(train, num_proc=2)
    assert (raised.value.rank, raised.value.exit_code) == (1, -9)
    killed, heard = (float((tmp_path / name).read_text()) for name in ("killed", "raised"))
    assert heard - killed < SURVIVORS_RAISE_S
    assert time.time() - killed < 3 * SURVIVORS_RAISE_S


def test_a_lost_task_is_named_with_its_rank_and_host(spark: Any) -> None:
    def lose_the_task() -> None:
        import signal

        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGKILL)  # Spark's own Python process
        time.sleep(60)

    with pytest.raises(WorkerFailedError, match=r"Rank 1 on host \S+ was lost") as raised:
        hvd_cluster.spark.run(lose_the_task, num_proc=2)
    assert raised.value.rank == 1
    assert len(str(raised.value)) < 1500
    assert raised.value.__cause__ is None  # else Python prints Spark's JVM frames above it


@pytest.mark.spark("local-cluster")
def test_a_lost_executor_is_named_and_its_replacement_is_waited_for(spark: Any) -> None:
    def lose_the_executor() -> None:
        import signal

        import psutil

        if os.environ["HOROVOD_RANK"] == "0":
            time.sleep(0.5)
            next(one for one in psutil.Process().parents() if one.name() == "java").send_signal(signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerFailedError, match=r"Rank 0 on host \S+ was lost") as raised:
        hvd_cluster.spark.run(lose_the_executor, num_proc=2)
    assert raised.value.rank == 0
    assert hvd_cluster.spark.run(lambda: 1, num_proc=2) == [1, 1]


def test_too_few_slots_are_said_before_anything_starts(spark: Any, spark_master: str) -> None:
    # A standalone master might get more workers, so there the wait has an end of its own.
    expected = StartTimeoutError if spark_master == "standalone" else NotEnoughSlotsError
    began = time.monotonic()
    with pytest.raises(expected, match=r"8 slots needed, \d free.* dynamic allocation is off"):
        hvd_cluster.spark.run(lambda: 1, num_proc=8, start_timeout=2)
    assert time.monotonic() - began < 10


def test_a_job_that_cannot_start_in_time_is_cancelled_and_says_what_it_waited_for(
    spark: Any, spark_slots: int, tmp_path: Path
) -> None:
    def occupy() -> bool:
        (tmp_path / "running").touch()
        return _wait_for_file(tmp_path / "leave")

    occupied: list[list[bool]] = []
    thread = threading.Thread(
        target=lambda: occupied.append(hvd_cluster.spark.run(occupy, num_proc=spark_slots, spark=spark))
    )
    thread.start()
    try:
        assert _wait_for_file(tmp_path / "running")
        with pytest.raises(StartTimeoutError, match="Timed out waiting for Spark tasks to start") as raised:
            hvd_cluster.spark.run(lambda: 1, num_proc=1, start_timeout=2)
    finally:
        (tmp_path / "leave").touch()
        thread.join()
    assert "1 slots needed" in str(raised.value)
    assert occupied == [[True] * spark_slots]  # the cancel hit its own job alone


def test_what_cannot_be_pickled_is_named_before_anything_starts(spark: Any) -> None:
    lock = threading.Lock()

    def train() -> bool:
        return lock.locked()

    with pytest.raises(LaunchError, match="captured variable 'lock'"):
        hvd_cluster.spark.run(train, num_proc=1)


@pytest.mark.spark("standalone")
def test_each_worker_of_a_node_owns_another_of_the_gpus_that_the_scheduler_assigned(spark: Any) -> None:
    from spark_sessions import FAKE_GPUS

    def devices() -> list[str]:
        return [os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "HOROVOD_LOCAL_SIZE")]

    results = hvd_cluster.spark.run(devices, num_proc=2)
    own = [visible.split(",")[int(local_rank)] for visible, local_rank, _ in results]
    assert sorted(own) == sorted(FAKE_GPUS)
    assert results[0][0] == results[1][0]
    assert [local_size for _, _, local_size in results] == ["2", "2"]
    assert sorted(hvd_cluster.spark.run(get_available_devices, num_proc=2)) == [[gpu] for gpu in sorted(FAKE_GPUS)]
    # Slot by slot: one worker alone sees the one GPU that its task was given.
    assert hvd_cluster.spark.run(devices, num_proc=1)[0][0] in FAKE_GPUS


@pytest.mark.spark("standalone")
def test_a_task_with_all_gpus_of_its_node_runs_a_worker_for_each(spark: Any) -> None:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
    from spark_sessions import FAKE_GPUS

    def devices() -> list[str]:
        names = ["CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_SIZE"]
        return [*(os.environ[name] for name in names), *get_available_devices()]

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1).resource("gpu", 2)).build
    results = hvd_cluster.spark.run(devices, num_proc=2, workers_per_task=2, resource_profile=profile)
    assert results == [[",".join(FAKE_GPUS), str(rank), "2", "2", FAKE_GPUS[rank]] for rank in range(2)]
    with pytest.raises(LaunchError, match="workers_per_task=4, but Spark has assigned 2 GPUs to a task"):
        hvd_cluster.spark.run(devices, num_proc=4, workers_per_task=4, resource_profile=profile)


@pytest.mark.spark("local-cluster", "connect")
def test_several_workers_of_a_task_are_ranks_like_others(spark: Any) -> None:
    def sums() -> tuple[float, list[str]]:
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
        return total, [os.environ[name] for name in ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")]

    results = hvd_cluster.spark.run(sums, num_proc=4, workers_per_task=2)
    assert results == [(10.0, [str(rank), str(rank), "4"]) for rank in range(4)]


@pytest.mark.spark("local-cluster")
def test_a_failure_ends_the_other_workers_of_its_task_too(spark: Any) -> None:
    def fail() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("one of two")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match="ValueError: one of two") as raised:
        hvd_cluster.spark.run(fail, num_proc=2, workers_per_task=2)
    assert raised.value.rank == 1
    assert time.monotonic() - began < 30


@pytest.mark.spark("local")
def test_a_profile_that_spark_cannot_take_is_refused(spark: Any) -> None:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    # Spark 3.5 knows none for DataFrames; Spark 4 takes them on clusters.
    said = "resource_profile needs Spark 4.0" if spark.version < "4" else "Profiles are only supported"
    with pytest.raises(LaunchError, match=said):
        hvd_cluster.spark.run(lambda: 1, num_proc=1, resource_profile=profile)


class _Job:
    def __init__(self, spark: Any) -> None:
        self.spark = spark

    def run(self) -> None: ...


@pytest.mark.spark("local", "connect")
def test_a_spark_object_in_a_closure_is_named_by_its_variable_alone(spark: Any) -> None:
    frame = spark.range(3)
    nested = [{"frame": frame}]
    for fn, where in [
        (lambda: spark.range(1).count(), "captured variable 'spark': pyspark."),
        (lambda: frame.count(), "captured variable 'frame': pyspark."),
        (lambda: nested, "captured variable 'nested', item 0, item 'frame': pyspark."),
        (_Job(spark).run, "the object that the method is bound to, attribute 'spark' of "),
    ]:
        with pytest.raises(LaunchError) as caught:
            hvd_cluster.spark.run(fn, num_proc=1)
        text = str(caught.value)
        assert where in text
        assert text.count("\n  - ") == 1
        assert "py4j" not in text
        assert "df.toPandas()" in text
        assert "TorchEstimator(...).fit(df)" in text
