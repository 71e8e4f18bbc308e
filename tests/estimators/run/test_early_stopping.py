"""Early stopping and the best epoch of histories in which some epochs lack the monitored number."""

from __future__ import annotations

import math

import pytest

from hvd_cluster.errors import DataError
from hvd_cluster.estimators import EarlyStopping


def records(*losses):
    """Epochs with a falling training loss and these validation losses; None for an epoch without a validation."""
    return [
        {
            "epoch": epoch,
            "train": {"loss": 1.0 - epoch / 100, "all_metrics": []},
            **({} if loss is None else {"validation": {"loss": loss, "all_metrics": []}}),
        }
        for epoch, loss in enumerate(losses)
    ]


@pytest.mark.parametrize("monitor", [None, "validation_loss"])
@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((None, 5.0, None, 4.0, None), 3),
        ((None, 4.0, None, 5.0, None), 1),
        ((None, 4.0, None, 4.0), 1),
        ((None, math.nan, None, 4.0), 3),
        ((None, math.nan, None), 1),
    ],
)
def test_the_best_epoch_is_one_with_the_monitored_number(monitor, losses, best):
    assert EarlyStopping(monitor=monitor).best_epoch(records(*losses)) == best


def test_epochs_without_the_monitored_number_do_not_count_as_not_better():
    stopping = EarlyStopping(patience=2)
    assert not stopping.is_over(records(5.0, None, None, None))
    assert not stopping.is_over(records(5.0, None, 6.0, None))
    assert stopping.is_over(records(5.0, None, 6.0, None, 7.0))
    assert not stopping.is_over([])


def test_the_training_loss_is_monitored_if_no_epoch_was_validated():
    assert EarlyStopping().best_epoch(records(None, None, None)) == 2
    with pytest.raises(DataError, match="monitor='validation_loss' is not in the history, which has epoch, train_loss"):
        EarlyStopping(monitor="validation_loss").best_epoch(records(None, None))
    assert EarlyStopping(monitor="validation_loss").best_epoch([]) == -1
