"""None for an argument of a public function means "not given", as in Horovod's functions."""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import cloudpickle
import pytest
import torch

from hvd_cluster.torch import synchronize

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def with_none(function: Any, *args: Any) -> list[str]:
    """The parameters for which None fails; those whose default is None are left out."""
    failed = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default not in (None, parameter.empty):
            try:
                result = function(*args, **{name: None})
                if "_async" in function.__name__:
                    synchronize(result)
            except Exception as error:  # noqa: BLE001 - collected
                failed.append(f"{function.__name__}({name}=None): {type(error).__name__}: {error}")
    return failed


def test_none_is_the_default_of_each_argument_of_torchs_functions(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        tensor, layer = torch.ones(2, 1), torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        failed = []
        for name in ("allreduce", "allreduce_", "allgather", "alltoall", "reducescatter"):
            failed += with_none(getattr(hvd, name), tensor)
        for name in ("allreduce_async", "allreduce_async_", "allgather_async", "alltoall_async", "reducescatter_async"):
            failed += with_none(getattr(hvd, name), tensor)
        for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter"):
            failed += with_none(getattr(hvd, name), [tensor])
        failed += with_none(hvd.broadcast, tensor, 0) + with_none(hvd.broadcast_, tensor, 0)
        failed += with_none(hvd.broadcast_parameters, layer.state_dict(), 0)
        failed += with_none(hvd.broadcast_optimizer_state, sgd, 0)
        failed += with_none(hvd.broadcast_object, 1) + with_none(hvd.allgather_object, 1) + with_none(hvd.barrier)
        failed += with_none(hvd.join) + with_none(hvd.DistributedOptimizer, sgd, list(layer.named_parameters()))
        batch_norm = hvd.SyncBatchNorm(1, process_set=None)
        batch_norm(tensor)
        assert hvd.allreduce(tensor, None, None, None, hvd.Sum, None, None, None).tolist() == [[2.0], [2.0]]
        return failed

    assert two(fn) == [[], []]


@pytest.mark.parametrize("keyword", ["average", "num_groups"])
def test_a_deprecated_argument_is_warned_of_where_it_is_given(two: Any, keyword: str) -> None:
    def fn(hvd: Any) -> str:
        sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if keyword == "average":
                hvd.allreduce(torch.ones(1), average=True)
            else:
                hvd.DistributedOptimizer(sgd, num_groups=1)
        assert "deprecated" in str(found[0].message)
        return str(found[0].filename)

    assert all(name.endswith("test_none_arguments.py") for name in two(fn))
