"""Fits in MLflow, with a real server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hvd_cluster.monitor.step_clock import ACTIVITIES

pytest.importorskip("mlflow", reason="mlflow is not installed")
pytest.importorskip("alembic", reason="the server of mlflow needs alembic")
pytest.importorskip("psutil", reason="the usage of hosts needs psutil")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of an MLflow server with its own database and folder."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "kept")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
    try:
        deadline_s = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s, (folder / "log").read_text()[-2000:]
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_a_fit_is_one_run_with_params_metrics_and_the_model(server, tmp_path):
    # In another process: MLflow leaves threads and variables behind.
    script = Path(__file__).parents[1] / "scripts" / "tracked_fits.py"
    # MLflow keeps what it downloaded.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(script), server], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    plain = found["plain"]
    assert plain["run"] == ["mine", "FINISHED"]
    assert (plain["params"]["epochs"], plain["params"]["loss"]) == ("3", "mse_loss")
    assert plain["logged"] == [[epoch, pytest.approx(loss)] for epoch, loss in plain["history"]]
    assert plain["time_share"] == [[epoch, pytest.approx(share)] for epoch, share in plain["recorded"]]
    assert {f"time_share/rank0/{activity}" for activity in ACTIVITIES} <= set(plain["metrics"])
    (host,) = plain["hosts"]
    assert {f"system/{host}/cpu_percent", f"system/{host}/memory_percent"} <= set(plain["metrics"])
    assert plain["same_weights"]
    assert plain["same_scores"]
    assert found["inner"] == [["FINISHED"], True]
    assert found["failing"] == ["FAILED"]
