"""Fits with a killed worker end with bitwise the weights of undisturbed fits."""

from __future__ import annotations

import random

import cloudpickle
import pytest
import survivors
import torch.nn.functional as F
from survivors import KillingLoss, estimator, what_was_learned

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import DiLoCo, LocalBackend

cloudpickle.register_pickle_by_value(survivors)


def test_a_killed_worker_does_not_change_the_result(frame, two_workers, tmp_path, caplog):
    undisturbed = estimator(F.mse_loss, backend=two_workers).fit(frame)
    mark = tmp_path / "killed"
    # About 163 training rows make 11 steps; 17 calls are in the second epoch, two steps after a checkpoint.
    killed = estimator(KillingLoss([mark], at=17), backend=LocalBackend(2, verbose=0), store=tmp_path).fit(frame)
    assert mark.exists()
    assert what_was_learned(killed) == what_was_learned(undisturbed)
    assert [record["epoch"] for record in killed.getHistory()] == [0, 1, 2]
    (warning,) = [record.getMessage() for record in caplog.records if "start again" in record.getMessage()]
    assert "(1 of at most 3 times)" in warning
    assert "was killed by signal 9" in warning
    assert warning.endswith(" of 3, from the last checkpoint")


@pytest.mark.needs("torch>=2.6")
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_that_is_killed_in_the_middle_of_a_round_does_not_change_the_result(
    frame, two_workers, tmp_path, rank
):
    """The workers have different weights and states of Adam then; the checkpoint has the outer optimizer's momentum."""
    apart = {"communication": DiLoCo(every=4)}
    undisturbed = estimator(F.mse_loss, backend=two_workers, **apart).fit(frame)
    mark = tmp_path / "killed"
    # A checkpoint ends a round; the call is in the third of the four steps of the next one.
    killed = estimator(KillingLoss([mark], rank=rank, at=17), num_proc=2, store=tmp_path, **apart).fit(frame)
    assert mark.exists()
    assert what_was_learned(killed) == what_was_learned(undisturbed)
    assert what_was_learned(killed) != what_was_learned(estimator(F.mse_loss, backend=two_workers).fit(frame))


@pytest.mark.slow
def test_a_fit_gives_up_after_max_restarts(frame, tmp_path):
    marks = [tmp_path / str(index) for index in range(5)]
    fit = estimator(KillingLoss(marks, at=2), num_proc=2, max_restarts=1, store=tmp_path / "store", run_id="r")
    with pytest.raises(WorkerFailedError, match=r"started again 1 times \(max_restarts\)") as caught:
        fit.fit(frame)
    assert caught.value.died
    assert [mark.exists() for mark in marks] == [True, True, False, False, False]


def test_the_users_own_exception_is_raised_at_once(frame, tmp_path):
    mark = tmp_path / "calls"

    def broken(record, model):
        mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
        raise KeyError("the user's mistake")

    with pytest.raises(WorkerFailedError) as caught:
        estimator(F.mse_loss, callbacks=[broken], num_proc=1, max_restarts=5).fit(frame)
    assert not caught.value.died
    assert mark.read_text() == "x"


@pytest.mark.slow
def test_a_driver_that_is_started_again_resumes_in_mid_epoch(frame, two_workers, tmp_path):
    undisturbed = estimator(F.mse_loss, backend=two_workers, run_id="r", random_seed=None).fit(frame)
    marks = [tmp_path / "killed"]
    same = {"num_proc": 2, "store": tmp_path, "run_id": "r", "random_seed": None}
    with pytest.raises(WorkerFailedError, match=r"fit again with run_id='r'"):
        estimator(KillingLoss(marks, rank=0, at=17), max_restarts=0, **same).fit(frame)
    resumed = estimator(F.mse_loss, **same).fit(frame)
    assert what_was_learned(resumed) == what_was_learned(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", ["store", "no store"])
def test_twenty_kills_in_a_row_change_nothing(frame, two_workers, tmp_path, where):
    undisturbed = estimator(F.mse_loss, backend=two_workers).fit(frame)
    draw = random.Random(3)
    for turn in range(20):
        loss = KillingLoss([tmp_path / f"killed-{turn}"], rank=draw.randrange(2), at=draw.randrange(2, 34))
        store = {"store": tmp_path / str(turn)} if where == "store" else {}
        killed = estimator(loss, num_proc=2, **store).fit(frame)
        assert what_was_learned(killed) == what_was_learned(undisturbed), turn
        assert (tmp_path / f"killed-{turn}").exists(), turn
