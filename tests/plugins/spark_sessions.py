"""One Spark session per test run, of the kind that ``--spark-master`` names.

The fixtures are ``spark`` (the session), ``spark_master`` (its kind) and ``spark_slots`` (how many barrier tasks it can
run at once). Programs that a test starts as drivers of their own use :func:`session` directly.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

#: Kind of session -> the slots it has.
SLOTS = {"local": 4, "local-cluster": 2, "connect": 4, "standalone": 2}
#: What the discovery script of the standalone worker reports: not 0 and 1, so that a rank is never taken for a GPU.
FAKE_GPUS = ("3", "5")
LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def session(kind: str, work_dir: Path, conf: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """A SparkSession of ``kind`` (a key of SLOTS) that leaves no process, folder or variable behind.

    Args:
        work_dir: an empty folder for the warehouse, Spark's temporary files and logs.
        conf: further settings of the session.
    """
    with contextlib.ExitStack() as stack:
        settings = {**_conf(work_dir), **(_gpu_conf() if kind == "standalone" else {}), **(conf or {})}
        stack.enter_context(_environment(kind, settings))
        if kind == "standalone":
            master = stack.enter_context(_standalone(work_dir))
        else:
            master = {"local": "local[4]", "connect": "local[4]", "local-cluster": "local-cluster[2,1,1024]"}[kind]

        from pyspark.sql import SparkSession

        builder = SparkSession.builder.appName("hvd_cluster tests")
        builder = builder.remote(master) if kind == "connect" else builder.master(master)
        spark = builder.getOrCreate()
        stack.callback(_stop, spark, kind)
        yield spark


def _submit_args(conf: Mapping[str, Any]) -> list[str]:
    texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in conf.items()}
    return [part for name, text in texts.items() for part in ("--conf", f"{name}={text}")]


def _conf(work_dir: Path) -> dict[str, Any]:
    jvm = f"-Dderby.system.home={work_dir} -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    return {
        "spark.ui.enabled": False,
        "spark.ui.showConsoleProgress": False,
        "spark.log.level": "ERROR",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "512m",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": jvm,
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": str(work_dir / "warehouse"),
        "spark.local.dir": str(work_dir / "scratch"),
    }


def _gpu_conf() -> dict[str, Any]:
    return {
        "spark.executor.resource.gpu.amount": len(FAKE_GPUS),
        "spark.task.resource.gpu.amount": 1,
        "spark.executor.cores": SLOTS["standalone"],
    }


@contextlib.contextmanager
def _environment(kind: str, conf: Mapping[str, Any]) -> Iterator[None]:
    """The variables that Spark reads when it starts, and what it leaves in the environment, undone afterwards."""
    before = dict(os.environ)
    for name in ("SPARK_HOME", "SPARK_REMOTE", "SPARK_TESTING", "SPARK_CONNECT_MODE", "SPARK_CONF_DIR"):
        os.environ.pop(name, None)
    os.environ.update(
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_DRIVER_PYTHON=sys.executable,
        SPARK_LOCAL_IP=LOOPBACK,
        SPARK_LOCAL_HOSTNAME=LOOPBACK,
        OMP_NUM_THREADS="1",
        # Not through the builder: Connect warns of every setting that it cannot change in a running server.
        PYSPARK_SUBMIT_ARGS=shlex.join([*_submit_args(conf), "pyspark-shell"]),
    )
    if kind == "connect":
        os.environ["SPARK_TESTING"] = "1"  # else the client dials port 15002, whoever listens there
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _stop(spark: Any, kind: str) -> None:
    from pyspark import SparkContext

    application_id = spark.sparkContext.applicationId if kind == "local-cluster" else ""
    spark.stop()
    gateway = SparkContext._gateway
    if gateway is not None:  # Spark keeps its JVM for the next session; a test run wants it gone
        SparkContext._gateway = SparkContext._jvm = None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=60)
    if application_id:  # a local cluster writes its executors' logs beside Spark's own files, whatever one sets
        shutil.rmtree(_spark_home() / "work" / application_id, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may be using it
            (_spark_home() / "work").rmdir()


def executor_folders() -> set[Path]:
    """The folders of local clusters' executors, which Spark keeps beside its own files."""
    return set((_spark_home() / "work").glob("app-*"))


def _spark_home() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent


@contextlib.contextmanager
def _standalone(work_dir: Path) -> Iterator[str]:
    """A master and one worker node with the fake GPUs; yields the master's URL."""
    script = work_dir / "gpus.sh"
    addresses = ",".join(f'"{address}"' for address in FAKE_GPUS)
    script.write_text(f"""#!/bin/sh\necho '{{"name": "gpu", "addresses": [{addresses}]}}'\n""")
    script.chmod(0o755)
    resources = work_dir / "worker.conf"
    resources.write_text(
        f"spark.worker.resource.gpu.amount {len(FAKE_GPUS)}\nspark.worker.resource.gpu.discoveryScript {script}\n"
    )
    port, master_ui, worker_ui = _free_ports(3)
    url = f"spark://{LOOPBACK}:{port}"
    with contextlib.ExitStack() as stack:
        master_log = stack.enter_context(
            _daemon(work_dir, "master.Master", "--host", LOOPBACK, "--port", port, "--webui-port", master_ui)
        )
        _wait_for(master_log, "New state: ALIVE")
        _worker = ("--host", LOOPBACK, "--cores", SLOTS["standalone"], "--memory", "1g", "--webui-port", worker_ui)
        place = ("--work-dir", work_dir / "nodes", "--properties-file", resources)
        worker_log = stack.enter_context(_daemon(work_dir, "worker.Worker", url, *_worker, *place))
        _wait_for(worker_log, "Successfully registered with master")
        yield url


@contextlib.contextmanager
def _daemon(work_dir: Path, name: str, *args: object) -> Iterator[Path]:
    """One of Spark's own daemons, from the wheel; yields its log."""
    log = work_dir / f"{name}.log"
    command = [_spark_home() / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *args]
    environ = {**os.environ, "SPARK_HOME": str(_spark_home()), "SPARK_DAEMON_MEMORY": "512m"}
    with log.open("w") as out:
        process = subprocess.Popen([str(part) for part in command], env=environ, stdout=out, stderr=out)
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, text: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{log} does not say {text!r}:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="session")
def spark_master(request: pytest.FixtureRequest) -> str:
    """The kind of session of this test run: a key of SLOTS."""
    return str(request.config.getoption("--spark-master", default="local"))


@pytest.fixture(scope="session")
def spark_slots(spark_master: str) -> int:
    """How many barrier tasks the session can run at once."""
    return SLOTS[spark_master]


@pytest.fixture(scope="session")
def _spark_session(spark_master: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with session(spark_master, tmp_path_factory.mktemp("spark")) as running:
        yield running


@pytest.fixture
def spark(request: pytest.FixtureRequest) -> Any:
    """The Spark session of this test run, classic or Connect as ``--spark-master`` says; for tests marked ``spark``."""
    if request.node.get_closest_marker("spark") is None:
        pytest.fail("a test that uses Spark needs @pytest.mark.spark: it runs once for each kind of session")
    return request.getfixturevalue("_spark_session")
