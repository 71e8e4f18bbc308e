from __future__ import annotations

import numpy as np
import pytest

from hvd_cluster.elastic.sampling import epoch_order, share


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    order = epoch_order(1000, shuffle=True, seed=3, epoch=2)
    assert sorted(order) == list(range(1000))
    assert (order == epoch_order(1000, shuffle=True, seed=3, epoch=2)).all()
    assert (order != epoch_order(1000, shuffle=True, seed=3, epoch=1)).any()
    assert (order != epoch_order(1000, shuffle=True, seed=2, epoch=3)).any()
    assert epoch_order(4, shuffle=False, seed=3, epoch=2).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [[4], [4, 2, 8, 1], [1, 3, 2, 6]])
def test_however_the_workers_change_each_sample_is_dealt_once(sizes: list[int]) -> None:
    order = epoch_order(96, shuffle=True, seed=0, epoch=0)
    processed, dealt, batch = 0, [], 2
    for size in sizes:
        shares = [share(order, processed, rank, size) for rank in range(size)]
        steps = 2 if size != sizes[-1] else len(shares[0]) // batch
        for step in range(steps):
            dealt += [sample for one in shares for sample in one[step * batch : (step + 1) * batch]]
        processed += steps * batch * size
    assert sorted(dealt) == list(range(96))


def test_all_ranks_get_equally_many_and_the_first_are_dealt_again_where_they_must() -> None:
    order = np.arange(7)
    shares = [share(order, 0, rank, 3).tolist() for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert [share(order, 6, rank, 3).tolist() for rank in range(3)] == [[6], [6], [6]]
    assert share(order, 7, 0, 3).tolist() == []
