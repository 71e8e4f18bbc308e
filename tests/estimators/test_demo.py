"""`make demo`, with Java and without."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "demo" / "run.py"


def run_demo(out, environ):
    done = subprocess.run(
        [sys.executable, str(DEMO), str(out)], capture_output=True, text=True, env=environ, check=False, cwd=out
    )
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"validation accuracy: ([\d.]+)", done.stdout)[1]) > 0.95
    assert "epoch 12/12" in done.stderr
    assert (out / "history.png").read_bytes().startswith(b"\x89PNG")
    assert {event.get("pid") for event in json.loads((out / "timeline.json").read_text())} >= {0, 1}
    assert (out / "model" / "metadata" / "_SUCCESS").exists()
    return done.stdout


@pytest.mark.parametrize(("target", "what"), [(".demo-ready", "the demo needs"), (".ready", "its tests need")])
def test_the_first_make_shows_what_pip_installs(tmp_path, target, what):
    pip = tmp_path / "venv/bin/python"
    pip.parent.mkdir(parents=True)
    # Like pip: prints what it installs, unless --quiet is given.
    pip.write_text('#!/bin/sh\ncase "$*" in *--quiet*) ;; *) echo "Collecting torch";; esac\n')
    pip.chmod(0o755)
    made = subprocess.run(
        ["make", "--no-print-directory", f"VENV={tmp_path / 'venv'}", str(tmp_path / "venv" / target)],
        cwd=DEMO.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.startswith(f"Installing hvd_cluster and what {what} into ")
    assert "Collecting torch" in made.stdout


@pytest.mark.slow
def test_without_java_it_says_so_and_trains_over_pandas(tmp_path):
    without = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": ""}
    lines = run_demo(tmp_path, without).splitlines()
    assert lines[0].startswith("No Java here")
    assert "apt-get install openjdk-17-jre-headless" in lines[0]
    *commands, read = [shlex.split(line) for line in lines if re.match("  [^ ]", line)]
    assert len(commands) == 2
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "ms per step" in done.stdout + done.stderr
    assert Path(read[1]).exists()


@pytest.mark.spark("local")
@pytest.mark.timeout(400)  # starts a Spark session and workers
def test_with_java_it_trains_on_spark(tmp_path):
    # PYSPARK_* belong to the session of this test run.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    assert "Training on Spark" in run_demo(tmp_path, clean).splitlines()[0]
