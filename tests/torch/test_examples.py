"""The examples in Horovod's manner, started as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
HOROVODRUN = Path(sys.executable).parent / "horovodrun"


def run(script: str, *arguments: str) -> str:
    command = [str(HOROVODRUN), "-np", "2", sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"Accuracy: ([\d.]+)%", output)]


def test_the_digits_are_learned(tmp_path: Path) -> None:
    output = run("torch_digits.py", "--epochs", "3", "--checkpoint", str(tmp_path / "digits.pt"))
    found = accuracies(output)
    assert len(found) == 3
    assert found[-1] > 85
    saved = torch.load(tmp_path / "digits.pt")
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1)
    assert saved["model"]["norm.num_batches_tracked"] == 3 * 23


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--use-adasum", "--lr", "0.1"],
        [
            *["--fp16-allreduce", "--use-mixed-precision"],
            *["--batches-per-allreduce", "2", "--gradient-predivide-factor", "2.0"],
        ],
    ],
    ids=["adasum", "mixed"],
)
def test_the_digits_are_learned_with_other_flags(flags: list[str]) -> None:
    assert accuracies(run("torch_digits.py", "--epochs", "3", *flags))[-1] > 70


def test_the_synthetic_benchmark_reports_what_all_workers_did() -> None:
    output = run("torch_synthetic_benchmark.py", "--num-iters", "2", "--num-batches-per-iter", "2", "--model", "mlp")
    (each,) = re.findall(r"Img/sec per \wPU: ([\d.]+)", output)
    (total,) = re.findall(r"Total img/sec on 2 \wPU\(s\): ([\d.]+)", output)
    assert float(total) == pytest.approx(2 * float(each), rel=0.01)
