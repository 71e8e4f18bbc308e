from __future__ import annotations

import logging
import math

import pytest

from hvd_cluster.estimators.view.fit_log import LossWatch


def epoch(number, train, validation=None):
    found = {"epoch": number, "train": {"loss": train}}
    return found if validation is None else {**found, "validation": {"loss": validation}}


def warnings_of(caplog, *records):
    watch = LossWatch("run")
    with caplog.at_level(logging.WARNING):
        for record in records:
            watch(record)
    return [record.getMessage() for record in caplog.records]


def test_large_finite_losses_give_no_warning(caplog):
    assert warnings_of(caplog, epoch(0, 1e300), epoch(1, 0.0, -1e300), {"epoch": 2}) == []


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([epoch(0, 1.0), epoch(1, math.nan), epoch(2, math.nan)], "run 'run': in epoch 1 the training loss is nan."),
        ([epoch(0, math.inf)], "run 'run': in epoch 0 the training loss is inf."),
        ([epoch(0, 1.0, math.nan), epoch(1, math.nan)], "run 'run': in epoch 0 the validation loss is nan."),
        ([epoch(0, math.nan, math.inf)], "in epoch 0 the training loss is nan and the validation loss is inf. Look"),
    ],
)
def test_the_first_non_finite_loss_gives_one_warning(caplog, records, text):
    (line,) = warnings_of(caplog, *records)
    assert text in line
