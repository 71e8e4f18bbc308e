from __future__ import annotations

import numpy as np
import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.launch import local
from hvd_cluster.torch.elastic.sampler import epoch_order, share


def test_a_loader_continues_behind_the_recorded_batches() -> None:
    data = torch.arange(10)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=1)
    loader = torch.utils.data.DataLoader(data, batch_size=3, sampler=sampler)
    assert len(sampler) == 10
    first: list[int] = []
    for index, batch in enumerate(loader):
        first += batch.tolist()
        sampler.record_batch(index, len(batch))
        if index == 1:
            break
    saved = sampler.state_dict()
    assert saved == {"epoch": 0, "processed_num": 6}
    other = hvd.elastic.ElasticSampler(data, shuffle=True, seed=1)
    other.load_state_dict(saved)
    assert sorted([*first, *other]) == list(range(10))
    assert other.remaining_indices == list(other)
    assert len(other) == 4


def test_a_new_epoch_has_another_order_and_all_samples() -> None:
    sampler = hvd.elastic.ElasticSampler(range(20), seed=0)
    before = list(sampler)
    sampler.record_batch(0, 20)
    sampler.set_epoch(1)
    assert sorted(sampler) == sorted(before)
    assert list(sampler) != before
    assert (sampler.epoch, sampler.processed_num) == (1, 0)


def test_a_batch_that_is_smaller_than_said_counts_no_more_than_there_is() -> None:
    sampler = hvd.elastic.ElasticSampler(range(5), shuffle=False)
    for index in range(2):
        sampler.record_batch(index, 3)
    assert sampler.processed_num == 5
    sampler.reset()
    assert list(sampler) == []


def shares_of_a_sampler_made_before_init() -> tuple[int, list[int], int]:
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    hvd.init()
    found = len(sampler), list(sampler)
    sampler.record_batch(0, 2)
    hvd.shutdown()
    return *found, sampler.processed_num


def test_a_sampler_made_before_init_divides_the_data_too() -> None:
    results = local.run(shares_of_a_sampler_made_before_init, num_proc=2)
    assert results == [(5, [0, 2, 4, 6, 8], 4), (5, [1, 3, 5, 7, 9], 4)]


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
