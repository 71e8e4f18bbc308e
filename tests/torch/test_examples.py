"""The examples in Horovod's manner, started as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
HOROVODRUN = Path(sys.executable).parent / "horovodrun"


def run(script: str, *arguments: str) -> str:
    return run_python(script, *arguments, launcher=[str(HOROVODRUN), "-np", "2"])


def run_python(script: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
    command = [*launcher, sys.executable, str(EXAMPLES / script), *arguments]
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
    saved = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1)
    assert saved["model"]["norm.num_batches_tracked"] == 3 * 23


@pytest.mark.slow
def test_ddp_learns_the_digits() -> None:
    assert accuracies(run("torch_ddp.py", "--epochs", "3"))[-1] > 85


@pytest.mark.slow
@pytest.mark.needs("torch>=2.6")
def test_workers_that_train_apart_in_rounds_learn_the_digits() -> None:
    assert accuracies(run_python("torch_diloco.py", "--epochs", "5"))[-1] > 85


@pytest.mark.slow
def test_fsdp2_learns_to_repeat() -> None:
    losses = [float(text) for text in re.findall(r"Loss: ([\d.]+)", run("torch_fsdp2.py", "--steps", "60"))]
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]


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


def hosts_script(folder: Path, *hosts: str) -> str:
    """A discovery script that prints those."""
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {host}\n" for host in hosts))
    script.chmod(0o755)
    return str(script)


@pytest.mark.slow
def test_the_digits_are_learned_by_an_elastic_job(tmp_path: Path) -> None:
    line = [
        str(HOROVODRUN),
        "-np",
        "2",
        "--min-np",
        "1",
        "--host-discovery-script",
        hosts_script(tmp_path, "localhost:2"),
    ]
    line += [sys.executable, str(EXAMPLES / "torch_digits_elastic.py"), "--checkpoint", str(tmp_path / "digits.pt")]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"Train Epoch: \d on 2 workers", done.stdout)) == 5
    assert accuracies(done.stdout)[0] > 85
    assert torch.load(tmp_path / "digits.pt", weights_only=True)["2.weight"].shape == (10, 64)


@pytest.mark.slow
def test_an_elastic_job_learns_the_digits_also_where_a_worker_dies(tmp_path: Path) -> None:
    # Two names of this machine: that of the dead worker is not used any more.
    script = hosts_script(tmp_path, "localhost:1", "127.0.0.1:1")
    line = [str(HOROVODRUN), "-np", "2", "--min-np", "1", "--host-discovery-script", script]
    line += [sys.executable, str(EXAMPLES / "torch_digits_elastic.py"), "--epochs", "40"]
    job = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert job.stdout is not None
        lines = []
        for text in job.stdout:
            lines.append(text)
            if "Train Epoch: 2 " in text:
                break
        children = psutil.Process(job.pid).children(recursive=True)
        workers = [child for child in children if child.cmdline()[1:2] == [str(EXAMPLES / "torch_digits_elastic.py")]]
        assert len(workers) == 2, [child.cmdline() for child in children]
        workers[1].kill()
        output = "".join(lines) + job.communicate(timeout=100)[0]
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, output
    epochs = re.findall(r"Train Epoch: (\d+) on (\d) workers", output)
    assert [int(epoch) for epoch, _ in epochs] == list(range(40))
    assert (epochs[0][1], epochs[-1][1]) == ("2", "1")
    assert accuracies(output)[0] > 90


@pytest.mark.slow
def test_the_synthetic_benchmark_reports_what_all_workers_did() -> None:
    output = run("torch_synthetic_benchmark.py", "--num-iters", "2", "--num-batches-per-iter", "2", "--model", "mlp")
    (each,) = re.findall(r"Img/sec per \wPU: ([\d.]+)", output)
    (total,) = re.findall(r"Total img/sec on 2 \wPU\(s\): ([\d.]+)", output)
    assert float(total) == pytest.approx(2 * float(each), rel=0.01)
