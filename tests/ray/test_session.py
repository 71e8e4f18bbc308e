"""A program that ends its connection to Ray while an executor has workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray_clusters import ray_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

PROGRAM = """\
import gc, os, threading
import ray
from hvd_cluster.errors import LaunchError
from hvd_cluster.ray import RayExecutor

def init():
    size = 100 * 2**20
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=size
    )

def await_actors():
    for thread in threading.enumerate():
        if thread.name.startswith("hvd-actor"):
            thread.join()

def fails(executor):
    try:
        executor.run(os.getpid, [bytes(100_000)])  # too large for a message: it would go into the object store
    except LaunchError as error:
        return str(error)

init()
executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=1)
executor.start()
"""

SHUTDOWN = """\
ray.shutdown()
print("run:", fails(executor), flush=True)
await_actors()
executor.shutdown()
del executor
gc.collect()
print("connected:", ray.is_initialized(), flush=True)
"""

HEARD = """\
ray.shutdown()
await_actors()
print("heard:", ray.is_initialized(), flush=True)
"""

AGAIN = """\
ray.shutdown()
init()
await_actors()
print("run:", fails(executor), flush=True)
executor.shutdown()
executor.start()
print("again:", executor.run(lambda: 7), flush=True)
executor.shutdown()
"""

ELASTIC = """\
executor.shutdown()
executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), min_workers=1)
executor.start()
ray.shutdown()
print("run:", fails(executor), flush=True)
print("connected:", ray.is_initialized(), flush=True)
"""


WAITING = """\
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.ray.actor import ActorWorker
from hvd_cluster.ray.session import Connection
from hvd_cluster.ray.worker import BaseHorovodWorker
executor.shutdown()
handle = ray.remote(BaseHorovodWorker).options(resources={"what no node has": 1}).remote()
worker = ActorWorker(Connection.current(), handle, handle.handshake.remote(b""), 0, None, Callbacks())
ray.shutdown()
print("ended:", worker.wait().ending())
print("connected:", ray.is_initialized(), flush=True)
"""


def output_of(program: str, folder: Path) -> str:
    script = folder / "program.py"
    script.write_text(PROGRAM + program)
    with ray_folder():
        done = subprocess.run(
            [sys.executable, script],
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


GONE = "run: the executor has no workers: this program's connection to Ray has ended (ray.shutdown()). Call start() fir"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (SHUTDOWN, [GONE, "connected: False"]),
        (HEARD, ["heard: False"]),
        (AGAIN, [GONE, "again: [7]"]),
        (ELASTIC, [GONE, "connected: False"]),
        (WAITING, ["ended: ended with this program's connection to Ray (ray.shutdown())", "connected: False"]),
    ],
    ids=["shutdown", "heard", "again", "elastic", "waiting"],
)
def test_an_executor_starts_no_cluster_after_the_programs_own_shutdown(
    tmp_path: Path, program: str, said: list[str]
) -> None:
    output = output_of(program, tmp_path)
    for text in said:
        assert text in output
