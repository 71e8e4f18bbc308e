"""Ranks with a GPU each, which is not GPU 0 for all of them, and ranks with two GPUs."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest
import torch

from hvd_cluster.launch import local

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two GPUs"),
]
ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}


def test_a_joined_rank_takes_part_on_the_gpu_of_its_tensors_without_having_selected_it() -> None:
    def fn() -> list[float]:
        import hvd_cluster.torch as hvd

        hvd.init()
        x = torch.ones(5, device=f"cuda:{hvd.local_rank()}")
        num_steps = 2 if hvd.rank() else 5
        found = [hvd.allreduce(x, op=hvd.Sum, name="uneven").mean().item() for _ in range(num_steps)]
        hvd.join()
        hvd.shutdown()
        return found

    assert local.run(fn, num_proc=2, env=ENV) == [[2.0, 2.0, 1.0, 1.0, 1.0], [2.0, 2.0]]


def test_ranks_reduce_tensors_of_two_gpus(transport: str) -> None:
    def fn(transport: str) -> list[str]:
        import hvd_cluster.torch as hvd

        if transport == "nccl":
            os.environ["NCCL_HOSTID"] = str(os.getpid())
        hvd.init()
        sides = [torch.cuda.Stream(gpu) for gpu in range(2)]
        wrong = []
        for turn in range(5):
            handles = {}
            for number in range(20):
                # The ranks need not have a tensor on GPUs of the same number.
                gpu = (number + hvd.rank()) % 2
                with torch.cuda.device(gpu), torch.cuda.stream(sides[gpu]):
                    torch.cuda._sleep(2_000_000)
                    tensor = torch.full((10_000 + number,), float(number + turn + hvd.rank()), device="cuda")
                    handles[number] = hvd.allreduce_async(tensor, op=hvd.Sum, name=f"many.{number}")
                    del tensor
            for number, handle in handles.items():
                gpu = (number + hvd.rank()) % 2
                with torch.cuda.device(gpu), torch.cuda.stream(sides[gpu]):
                    result = hvd.synchronize(handle)
                    if result.device.index != gpu or not bool((result == 2 * (number + turn) + 1).all()):
                        wrong.append(f"turn {turn}, tensor {number}: {result[:3]}")
        hvd.shutdown()
        return wrong

    assert local.run(fn, (transport,), num_proc=2, env=ENV) == [[], []]
