from __future__ import annotations

import torch

from hvd_cluster.estimators.torch.means import Means


def means(*names):
    return Means([names] if names else [], torch.device("cpu"))


def test_an_epoch_continues_with_its_sums():
    first, second = means("a"), means("a")
    first.add(torch.tensor(2.0), [0.5], 4)
    second.restore(first.sums)
    second.add(torch.tensor(1.0), [torch.tensor(1.0)], 2)
    assert second.sums.tolist() == [10.0, 4.0, 6.0]


def test_an_epoch_that_continues_with_other_metrics_adds_up_its_rest():
    before, now = means(), means("a", "b")
    before.add(torch.tensor(2.0), [], 4)
    now.restore(before.sums)
    now.add(torch.tensor(1.0), [3.0, 5.0], 2)
    assert now.sums.tolist() == [2.0, 6.0, 10.0, 2.0]
