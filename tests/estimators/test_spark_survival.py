"""Spark fits with a killed worker, Python task or executor, on every kind of session."""

from __future__ import annotations

import random
import sys

import cloudpickle
import numpy as np
import pytest
import survivors
import torch.nn.functional as F
from survivors import KillingLoss, estimator, what_was_learned

cloudpickle.register_pickle_by_value(survivors)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1200)]

ROWS = 230


@pytest.fixture
def data(spark):
    values = np.random.default_rng(7).normal(size=(ROWS, 4))
    rows = [(row.tolist(), float(row.sum())) for row in values]
    # No shuffle: its order would differ in each fit.
    return spark.createDataFrame(rows, "x array<double>, y double")


@pytest.fixture(scope="module")
def learned_undisturbed():
    """The weights of an undisturbed fit, computed once per session."""
    return {}


def undisturbed(data, kept, **params):
    if not kept:
        kept.update(learned=what_was_learned(estimator(F.mse_loss, num_proc=2, **params).fit(data)))
    return kept["learned"]


@pytest.mark.parametrize("where", ["store", "no store"])
@pytest.mark.parametrize("victim", ["worker", "task", "executor"])
def test_a_death_in_mid_epoch_changes_nothing(data, spark_master, tmp_path, learned_undisturbed, caplog, victim, where):
    if victim == "executor" and spark_master in ("local", "connect"):
        pytest.skip("the executor is the driver's own JVM")
    expected = undisturbed(data, learned_undisturbed, store=tmp_path / "undisturbed")
    loss = KillingLoss([tmp_path / "killed"], at=17, victim=victim)
    store = {"store": tmp_path / "work"} if where == "store" else {}
    killed = estimator(loss, num_proc=2, **store).fit(data)
    assert (tmp_path / "killed").exists()
    assert what_was_learned(killed) == expected
    assert [text for text in caplog.messages if "(1 of at most 3 times)" in text]


#: For executors' Pythons: the first that writes received rows kills itself or its executor.
KILLS_ONCE = """
import os, pathlib, signal, psutil
mark, victim, write = pathlib.Path({mark!r}), {victim!r}, os.pwrite
def kills_once(*args):
    if not mark.exists():
        mark.touch()
        me = psutil.Process()
        java = next(one for one in me.parents() if "java" in one.name())
        os.kill(java.pid if victim == "executor" else me.pid, signal.SIGKILL)
    return write(*args)
os.pwrite = kills_once
"""


@pytest.mark.spark("local-cluster", "local")
@pytest.mark.parametrize("victim", ["task", "executor"])
def test_a_death_while_the_rows_arrive_changes_nothing(
    data, spark, spark_master, tmp_path, monkeypatch, learned_undisturbed, caplog, victim
):
    if victim == "executor" and spark_master == "local":
        pytest.skip("the executor is the driver's own JVM")
    expected = undisturbed(data, learned_undisturbed, store=tmp_path / "undisturbed")
    killed = tmp_path / "killed"
    (tmp_path / "sitecustomize.py").write_text(KILLS_ONCE.format(mark=str(killed), victim=victim))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    fitted = estimator(F.mse_loss, num_proc=2).fit(data)
    assert killed.exists()
    assert what_was_learned(fitted) == expected
    assert [text for text in caplog.messages if "(1 of at most 3 times)" in text]


@pytest.mark.spark("local-cluster", "connect")
def test_twenty_kills_in_a_row_change_nothing(data, spark_master, tmp_path, learned_undisturbed):
    expected = undisturbed(data, learned_undisturbed, store=tmp_path / "undisturbed")
    victims = ["worker", "task", "executor"] if spark_master == "local-cluster" else ["worker", "task"]
    draw = random.Random(5)
    for turn in range(20):
        mark = tmp_path / f"killed-{turn}"
        loss = KillingLoss([mark], rank=draw.randrange(2), at=draw.randrange(2, 34), victim=draw.choice(victims))
        store = {"store": tmp_path / f"work-{turn}"} if turn % 2 else {}
        assert what_was_learned(estimator(loss, num_proc=2, **store).fit(data)) == expected, turn
        assert mark.exists(), turn
