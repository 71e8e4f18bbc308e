from __future__ import annotations

import torch

from hvd_cluster.estimators.torch.means import Means, reset_states


def means(*names):
    return Means([names] if names else [], torch.device("cpu"))


def test_an_epoch_continues_with_its_sums():
    first, second = means("a"), means("a")
    first.add(torch.tensor(2.0), [0.5], 4)
    second.restore(first.sums, first.names)
    second.add(torch.tensor(1.0), [torch.tensor(1.0)], 2)
    assert second.sums.tolist() == [10.0, 4.0, 6.0]


def test_an_epoch_that_continues_with_other_metrics_adds_up_its_rest():
    before, now = means(), means("a", "b")
    before.add(torch.tensor(2.0), [], 4)
    now.restore(before.sums, before.names)
    now.add(torch.tensor(1.0), [3.0, 5.0], 2)
    assert now.sums.tolist() == [2.0, 6.0, 10.0, 2.0]


def test_other_metrics_of_the_same_number_do_not_continue_with_the_sums():
    before, now = means("a", "b"), means("b", "c")
    before.add(torch.tensor(2.0), [1.0, 1.0], 4)
    now.restore(before.sums, before.names)
    assert now.sums.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_metrics_with_a_state_begin_again():
    class Count:
        made = 0

        def reset(self):
            self.made = 0

    count = Count()
    count.made = 3
    reset_states([len, count])
    assert count.made == 0
