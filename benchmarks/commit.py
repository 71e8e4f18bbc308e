"""A commit of a model of 100M parameters with SGD's momentum: ``TorchState.save`` against a deep copy each time."""

from __future__ import annotations

import copy

from benchmarks.measure import Table, compare, row


def measure() -> Table:
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(3162, 3162, bias=False) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = hvd.elastic.TorchState(model, optimizer)
    kept: list[object] = []

    def deep_copy() -> None:
        kept[:] = [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]

    times = compare(state.save, deep_copy, turns=9, per_turn=1)
    hvd.shutdown()
    return Table(
        "Commit of a model of 100M parameters, 800 MB in all", "deep copy", [row("TorchState.save, in memory", times)]
    )
