"""``kill -9`` to a worker of an elastic job of TensorFlow or Keras: the job ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TRAIN = Path(__file__).with_name("scripts") / "elastic_train.py"
PROGRAMS = [("function", "tensorflow"), ("fit", "tensorflow"), ("fit", "torch"), ("fit", "jax")]


class Job:
    """An elastic hvdrun of two hosts of one slot, both this machine."""

    def __init__(self, folder: Path, kind: str, backend: str, pause_s: float) -> None:
        self.folder = folder
        folder.mkdir()
        self.log = folder / "log"
        hosts = f"{sys.executable} -c 'print(\"localhost:1\\n127.0.0.1:1\")'"
        flags = ["-np", "2", "--blacklist-cooldown-range", "1", "1", "--host-discovery-script", hosts]
        env = {
            "KERAS_BACKEND": backend,
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *[sys.executable, "-m", "hvd_cluster.launch.cli.main", "--verbose", *flags],
                    *[sys.executable, str(TRAIN), str(folder), kind, str(pause_s)],
                ],
                stdout=log,
                stderr=log,
                env=os.environ | env,
            )

    def kill(self, rank: int, from_step: int) -> None:
        """``kill -9`` to the worker of ``rank`` once it has taken that many steps."""
        deadline_s = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            for note in self.folder.glob("pid.*"):
                step, its_rank = map(int, note.read_text().split())
                if its_rank == rank and step >= from_step:
                    os.kill(int(note.name.removeprefix("pid.")), signal.SIGKILL)
                    return
            time.sleep(0.02)

    def end(self) -> dict[str, Any]:
        """What the job wrote in the end."""
        try:
            assert self.process.wait(200) == 0, self.log.read_text()
        finally:
            self.process.kill()
            self.process.wait()
        end: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        return end


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("kind", "backend"), PROGRAMS)
def test_a_worker_that_is_killed_and_replaced_changes_nothing(kind: str, backend: str, tmp_path: Path) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    undisturbed = Job(tmp_path / "undisturbed", kind, backend, pause_s=0.0).end()
    job = Job(tmp_path / "disturbed", kind, backend, pause_s=0.1)
    job.kill(rank=1, from_step=11)
    end = job.end()
    assert "restart: generation 1 has 2 workers, 1 of them new" in job.log.read_text()
    assert end["equal"]
    assert end["size"] == 2
    assert end["weights"] == pytest.approx(undisturbed["weights"], abs=1e-6)
