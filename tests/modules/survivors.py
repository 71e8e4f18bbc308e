"""A net that a restart could get wrong, and a loss that kills processes: what the tests of survival share."""

from __future__ import annotations

import os
import signal

import torch
import torch.nn.functional as F

from hvd_cluster.estimators import TorchEstimator


class Net(torch.nn.Module):
    """With dropout and running means: what a restart could get wrong."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(F.dropout(torch.tanh(self.norm(self.first(x))), 0.3, self.training))


def kill(victim):
    """Kill this "worker", or its "task", a Python process, or its "executor", a JVM."""
    import psutil

    me = psutil.Process()
    pids = {"worker": lambda: me.pid, "task": me.ppid}
    pid = pids.get(victim, lambda: next(one.pid for one in me.parents() if "java" in one.name()))()
    os.kill(pid, signal.SIGKILL)


class KillingLoss:
    """The mean squared error; on one rank, the ``at``-th call of a process kills it, as often as there are marks."""

    def __init__(self, marks, rank=1, at=9, victim="worker"):
        self.marks, self.rank, self.at, self.victim = list(marks), rank, at, victim
        self.calls = 0

    def __call__(self, output, label):
        self.calls += torch.is_grad_enabled()
        mark = next((mark for mark in self.marks if not mark.exists()), None)
        if self.calls == self.at and mark and os.environ.get("RANK") == str(self.rank) and torch.is_grad_enabled():
            mark.touch()
            kill(self.victim)
        return F.mse_loss(output, label)


def estimator(loss, **params):
    net = Net()
    given = {
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "random_seed": 5,
        "verbose": 0,
        "checkpoint_every_steps": 3,
        "validation": 0.2,
        **params,
    }
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)  # noqa: E731 - travels by value
    return TorchEstimator(
        model=net, optimizer=optimizer, loss=loss, lr_scheduler=schedule, lr_scheduler_interval="step", **given
    )


def what_was_learned(model):
    """Weights, buffers and losses, to compare without tolerance."""
    losses = [(record["train"]["loss"], record["validation"]["loss"]) for record in model.getHistory()]
    return {name: value.tolist() for name, value in model.getModel().state_dict().items()}, losses
