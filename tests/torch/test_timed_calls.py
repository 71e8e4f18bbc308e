"""What the step clock measures in loops of torch on two ranks."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ACTIVITIES = ("data", "compute", "late", "transfer", "optimizer", "save", "other")
BATCHES = 8


def measured(hvd: Any, loop: Any, slow: str) -> tuple[int, str, float]:
    """Number of steps, the largest activity and the sum of the shares of a loop in which rank 1 waits in ``slow``."""
    import time

    from hvd_cluster.monitor.step_clock import step_clock

    def wait(place: str) -> None:
        if place == slow and hvd.rank() == 1:
            time.sleep(0.04)

    step_clock.restart()
    loop(hvd, wait)
    steps = hvd.step_times()
    total = sum(each.total_s for each in steps)
    shares = {name: sum(getattr(each, f"{name}_s") for each in steps) / total for name in ACTIVITIES}
    return step_clock.num_steps, max(shares, key=shares.__getitem__), sum(shares.values())


def model_and_optimizer(hvd: Any, kind: str = "SGD", **options: Any) -> tuple[Any, Any]:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def with_loader(hvd: Any, wait: Any) -> None:
    import io

    import torch

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return BATCHES * 4

        def __getitem__(self, index: int) -> Any:
            if index % 4 == 0:
                wait("data")
            return torch.ones(4)

    model, optimizer = model_and_optimizer(hvd)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=4):
        optimizer.zero_grad()
        loss = model(batch).sum()
        wait("compute")
        loss.backward()
        optimizer.step()
        wait("other")

        class Saved:
            def __reduce__(self) -> Any:
                wait("save")
                return int, ()

        torch.save(Saved(), io.BytesIO())


@pytest.mark.parametrize("slow", ["data", "compute", "save", "other"])
def test_a_wait_counts_where_it_is_and_as_late_on_the_other_rank(two: Any, slow: str) -> None:
    (num0, largest0, sum0), (num1, largest1, sum1) = two(measured, with_loader, slow)
    assert (num0, num1) == (BATCHES, BATCHES)
    assert (largest0, largest1) == ("late", slow)
    assert (sum0, sum1) == (pytest.approx(1), pytest.approx(1))


def in_memory(hvd: Any, wait: Any) -> None:
    import torch

    model, optimizer = model_and_optimizer(hvd)
    for _ in range(BATCHES):
        wait("compute")
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()


def accumulating(hvd: Any, wait: Any) -> None:
    import torch

    model, optimizer = model_and_optimizer(hvd, backward_passes_per_step=2)
    for _ in range(BATCHES):
        for _ in range(2):
            wait("compute")
            model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_closure(hvd: Any, wait: Any) -> None:
    import torch

    model, optimizer = model_and_optimizer(hvd, "LBFGS")

    def closure() -> Any:
        optimizer.zero_grad()
        wait("compute")
        loss = (model(torch.ones(4, 4)) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(BATCHES):
        optimizer.step(closure)


def in_another_thread(hvd: Any, wait: Any) -> None:
    import threading

    thread = threading.Thread(target=in_memory, args=(hvd, wait))
    thread.start()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [in_memory, accumulating, with_closure, in_another_thread])
def test_loops_without_a_loader_have_a_step_for_each_update_that_begins_with_computation(two: Any, loop: Any) -> None:
    (num0, largest0, sum0), (num1, largest1, sum1) = two(measured, loop, "compute")
    assert (num0, num1) == (BATCHES, BATCHES)
    assert (largest0, largest1) == ("late", "compute")
    assert (sum0, sum1) == (pytest.approx(1), pytest.approx(1))


def with_two_optimizers(hvd: Any, wait: Any) -> None:
    import torch

    pairs = [model_and_optimizer(hvd) for _ in range(2)]
    for _ in range(BATCHES):
        for model, optimizer in pairs:
            wait("compute")
            model(torch.ones(4, 4)).sum().backward()
            optimizer.step()


def test_each_of_two_optimizers_has_its_own_steps(two: Any) -> None:
    (num0, largest0, _), (num1, largest1, _) = two(measured, with_two_optimizers, "compute")
    assert (num0, num1) == (2 * BATCHES, 2 * BATCHES)
    assert (largest0, largest1) == ("late", "compute")
