"""Fits that end because the loss is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.finite_check import FiniteCheck, FiniteWeights, all_finite, not_finite_text
from hvd_cluster.estimators.spec import Inputs


class OtherRank:
    """Rank 0 of two ranks, ``allgather_object`` returns ``found`` for the other."""

    Max = "max"

    def __init__(self, found=None):
        self.found = found

    def allreduce(self, flag, op, name):
        return torch.tensor([max(int(flag), int(self.found is not None))])

    def allgather_object(self, mine, name):
        return [mine, self.found]


def losses(found=None, **given):
    return FiniteCheck(True, OtherRank(found), "run", **given)


def test_the_first_non_finite_step_of_all_ranks_is_named():
    mine = losses((3, "the loss is inf", None))
    for step, loss in enumerate([1.0, 2.0, 3.0, 4.0, math.nan]):
        mine.add(step, torch.tensor(loss))
    with pytest.raises(DataError, match=r"the loss is inf on rank 1 in step 3 of epoch 2, and terminate_on_nan is set"):
        mine.check(2)


def test_the_batch_of_a_loss_that_is_not_finite_decides_the_advice():
    inputs = Inputs(feature_cols=("x",), label_cols=("y",), sample_weight_col="w")
    batches = [
        {"x": torch.ones(3, 2), "y": torch.ones(3), "w": torch.ones(3)},
        {"x": torch.tensor([[1.0, math.inf]] * 2), "y": torch.tensor([1.0, math.nan]), "w": torch.ones(2)},
    ]
    for first, text in (
        (0, "feature column 'x' holds infinities in 2 of 2 rows .*; label column 'y' holds NaN in 1 of 2 rows"),
        (None, "all numbers of this batch are finite, so lower the learning rate"),
    ):
        mine = losses(look=lambda epoch, step: not_finite_text(inputs, batches[step]))
        mine.add(0 if first is None else 1, torch.tensor(math.nan), first)
        with pytest.raises(DataError, match=text):
            mine.check(0)


def test_the_batch_of_the_step_before_may_have_spoiled_the_weights():
    mine = losses(look=lambda epoch, step: ["", "feature column 'x' holds infinities", ""][step])
    mine.add(2, torch.tensor(math.nan))
    with pytest.raises(DataError, match=r"in step 2 .*: in the step before, feature column 'x' holds infinities\."):
        mine.check(0)


def test_a_rank_whose_batch_explains_the_loss_comes_first():
    mine = losses((0, "the loss is nan", "label column 'y' holds NaN"))
    mine.add(0, torch.tensor(math.nan))
    with pytest.raises(DataError, match=r"on rank 1 in step 0 .*: label column 'y' holds NaN\. Fill in"):
        mine.check(0)


def test_weights_are_checked_if_the_loss_is_still_finite():
    mine = losses()
    mine.add(4, torch.tensor(1.0))
    mine.check(0)
    with pytest.raises(DataError, match="the weights are not finite, though the loss is, on rank 0 in step 4"):
        mine.check(0, lambda: all_finite([torch.ones(2), torch.tensor([1.0, math.inf]), torch.tensor([1])]))


def test_saved_buffers_count_unless_they_were_infinite_from_the_beginning():
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    is_finite = FiniteWeights(model)
    model.cache.fill_(math.inf)
    assert is_finite()
    model.running_var[1] = math.nan
    assert not is_finite()


def test_a_few_non_finite_losses_are_allowed_with_a_gradient_scaler():
    mine = losses(has_scaler=True)
    for step, loss in enumerate([1.0, math.inf, 1.0, math.inf, math.inf]):
        mine.add(step, torch.tensor(loss))
    mine.check(0)
    for step in range(5, 11):
        mine.add(step, math.nan)
    with pytest.raises(DataError, match="the loss is inf on rank 0 in step 3 of epoch 0"):
        mine.check(0)
