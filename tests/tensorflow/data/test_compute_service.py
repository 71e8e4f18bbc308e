"""A tf.data service of two workers under hvdrun, and two training ranks that read from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hvd_cluster.launch.local import Executor

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SHIM = Path(__file__).parents[3] / "hvd_cluster/compat/shim"
WORKER = {"ours": "hvd_cluster.tensorflow.data.compute_worker", "Horovod's": "horovod.tensorflow.data.compute_worker"}
QUIET = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
ON_SPARK = "horovod.spark.tensorflow.compute_worker"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """``serve(module, *flags)`` starts two workers; gives their config file. They have to end well by themselves."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "log"

    def start(module: str, *flags: str) -> str:
        config = str(tmp_path / "service.json")
        command = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "-np", "2", "--as-horovod"]
        environment: dict[str, str] = {}
        if module == ON_SPARK:
            command = []
            environment = {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell", "PYTHONPATH": str(SHIM)}
            environment["PYSPARK_PYTHON"] = sys.executable
        with log.open("wb") as out:
            started.append(
                subprocess.Popen(
                    [*command, sys.executable, "-m", module, config, *flags],
                    stdout=out,
                    stderr=out,
                    env=os.environ | QUIET | environment,
                )
            )
        return config

    try:
        yield start
        for process in started:
            assert process.wait(60) == 0, log.read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)  # Spark and four processes with TensorFlow start
@pytest.mark.parametrize("module", [WORKER["Horovod's"], ON_SPARK])
def test_two_ranks_share_one_pass_that_two_workers_prepare(two: Any, serve: Any, module: str) -> None:
    if module == ON_SPARK:
        pytest.importorskip("pyspark")
    config = serve(module)

    def fn(hvd: Any, path: str) -> list[Any]:
        import tensorflow as tf

        from hvd_cluster.tensorflow.data.compute_service import TfDataServiceConfig

        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        dataset = tf.data.Dataset.range(40).map(lambda x: x * x)
        shared = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
        seen = [int(value) for value in shared]
        own = [int(value) for value in dataset.send_to_data_service(config, hvd.rank(), hvd.size())]
        endless = dataset.repeat().batch(4)
        options = {"processing_mode": "parallel_epochs", "reuse_dataset": True, "round_robin": True}
        dealt = iter(endless.send_to_data_service(config, hvd.rank(), hvd.size(), **options))
        batches = [len(next(dealt)) for _ in range(3)]
        del dealt
        hvd.barrier()
        if hvd.rank() == 0:
            config.compute_client().shutdown()
        return [seen, own, batches]

    (seen, own, batches), (other_seen, other_own, _) = two(fn, config)
    squares = [number * number for number in range(40)]
    assert sorted(seen + other_seen) == squares
    assert sorted(own) == sorted(other_own) == squares
    assert batches == [4, 4, 4]


@pytest.mark.slow
def test_dispatchers_on_the_training_side_serve_a_rank_each(two: Any, serve: Any) -> None:
    config = serve(WORKER["ours"], "--dispatchers", "2", "--dispatcher-side", "training")

    def fn(hvd: Any, path: str) -> list[Any]:
        import tensorflow as tf

        from hvd_cluster.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        dataset = tf.data.Dataset.range(10)
        try:
            dataset.send_to_data_service(config, hvd.rank())
        except RuntimeError as error:
            refused = "tf_data_service(compute_config, rank)" in str(error)
        with tf_data_service(config, hvd.rank()) as address:
            distribute = tf.data.experimental.service.distribute(processing_mode="parallel_epochs", service=address)
            seen = [int(value) for value in dataset.apply(distribute)]
            hvd.barrier()
            if hvd.rank() == 0:
                config.compute_client().shutdown()
        return [refused, sorted(seen)]

    assert two(fn, config) == [[True, list(range(10))]] * 2  # one worker for each


def test_dispatchers_and_workers_register_ipv6_addresses_in_brackets(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        import socket
        from threading import Thread

        import tensorflow as tf

        from hvd_cluster.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
        from hvd_cluster.tensorflow.data.registry import ComputeService

        if not socket.has_dualstack_ipv6():
            return "IPv6 is missing"
        with ComputeService(2, 1, b"key", "::1") as service:
            port = hvd.broadcast_object(service.port)
            config = TfDataServiceConfig(2, 1, "compute", [f"[::1]:{port}"], b"key", timeout=20)
            worker = Thread(target=compute_worker_fn, args=(config,))
            worker.start()
            dataset = tf.data.Dataset.range(4).send_to_data_service(config, hvd.rank(), hvd.size())
            seen = sorted(int(value) for value in dataset)
            hvd.barrier()
            config.compute_client().shutdown()
            worker.join()
            hvd.barrier()
        return seen

    ranks = two(fn)
    if "IPv6 is missing" in ranks:
        pytest.skip("IPv6 is missing")
    assert ranks == [[0, 1, 2, 3]] * 2


def job_names(hvd: Any, num_shared: Sequence[int]) -> list[str]:
    """The jobs that a rank asks for when it shares ``num_shared[rank]`` passes; no service is needed for that."""
    from contextlib import nullcontext
    from unittest import mock

    import tensorflow as tf

    from hvd_cluster.tensorflow.data import compute_service

    config = compute_service.TfDataServiceConfig(1, 1, "compute", [], b"")
    dataset = tf.data.Dataset.range(1)
    with (
        mock.patch.object(compute_service, "tf_data_service", return_value=nullcontext("grpc://nowhere")),
        mock.patch.object(tf.data.experimental.service, "distribute", return_value=lambda dataset: dataset) as made,
    ):
        for _ in range(num_shared[hvd.rank()]):
            dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    return [call.kwargs["job_name"] for call in made.call_args_list]


@pytest.mark.slow
def test_the_ranks_of_a_world_share_jobs_that_no_other_world_has_named(two: Any) -> None:
    def fn(hvd: Any, num_shared: Sequence[int]) -> list[str]:
        hvd.shutdown()  # as after a failure
        hvd.init(process_sets="dynamic")
        return job_names(hvd, num_shared)

    one, other = two(fn, [3, 1]), two(fn, [2, 2])
    with Executor(1, env=QUIET) as alone:  # another job, with the same service
        (single,) = alone.run(in_two_worlds)
    assert one[0][0] == one[1][0]
    assert other[0] == other[1]
    names = one[0] + other[0] + single
    assert len(set(names)) == len(names) == 3 + 2 + 4


def in_two_worlds() -> list[str]:
    import hvd_cluster.tensorflow as hvd

    found: list[str] = []
    for _ in range(2):
        hvd.init()
        found += job_names(hvd, [2])
        hvd.shutdown()
    return found


def test_a_second_dispatcher_on_the_training_side_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        from hvd_cluster.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
        from hvd_cluster.tensorflow.data.registry import ComputeService

        said: list[str] = []
        with ComputeService(1, 1, b"key") as service:
            config = TfDataServiceConfig(1, 1, "training", [f"127.0.0.1:{service.port}"], b"key", timeout=5)
            config.compute_client().register_worker_for_dispatcher(0, 0)
            for _ in range(2):
                try:
                    with tf_data_service(config, 0):
                        said.append("")
                except RuntimeError as error:
                    said.append(str(error))
        return said

    for first, second in two(fn):
        assert first == ""
        assert "the workers stay with it" in second
        assert "--dispatcher-side compute" in second


@pytest.mark.slow
def test_a_config_survives_a_file_that_only_its_user_can_read(two: Any, tmp_path: Path) -> None:
    def fn(hvd: Any, path: str) -> list[Any]:
        from pathlib import Path

        from hvd_cluster.tensorflow.data.compute_service import TfDataServiceConfig

        if hvd.rank() == 0:
            TfDataServiceConfig(1, 2, "compute", ["127.0.0.1:1"], b"secret", timeout=5).write(path)
        config = TfDataServiceConfig.read(path, wait_for_file_creation=True)
        refused = []
        for arguments in ((1, 1, "somewhere"), (0, 1, "compute")):
            try:
                TfDataServiceConfig(*arguments, [], b"")
            except ValueError as error:
                refused.append(str(error)[:11])
        return [config.key, config.timeout, oct(Path(path).stat().st_mode & 0o777), refused]

    expected = [b"secret", 5, "0o600", ["dispatcher_", "dispatchers"]]
    assert two(fn, str(tmp_path / "config.json")) == [expected] * 2
