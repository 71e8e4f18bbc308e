"""What the step clock measures in a fit of two ranks, on each backend of Keras."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BATCHES = 12


def shares_of_fit(hvd: Any, slow: str, passes: int = 1, folder: str = "") -> tuple[int, dict[str, float], float]:
    """Number of steps, share of each activity and their sum, of a fit in which rank 1 waits in ``slow``."""
    import time

    import keras
    import numpy as np

    from hvd_cluster.monitor.step_clock import step_clock

    def wait(place: str) -> None:
        if place == slow and hvd.rank() == 1:
            time.sleep(0.05)

    def batches() -> Any:
        while True:
            wait("data")
            x = np.ones((8, 4), "float32")
            yield x, x[:, :1]

    class Slow(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            wait("begin")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            wait("end")
            if slow == "save" and hvd.rank() == 1:
                for number in range(3):
                    self.model.save(f"{folder}/{number}.keras")

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=passes)
    model.compile(optimizer, "mse")
    step_clock.restart()
    model.fit(batches(), steps_per_epoch=BATCHES // 2, epochs=2, verbose=0, callbacks=[Slow()])
    steps = hvd.step_times()
    total = sum(step.total_s for step in steps)
    shares = {name: sum(getattr(step, f"{name}_s") for step in steps) / total for name in ACTIVITIES}
    return step_clock.num_steps, shares, sum(shares.values())


ACTIVITIES = ("data", "compute", "late", "transfer", "optimizer", "save", "other")


def largest(shares: dict[str, float]) -> str:
    """The activity with the largest share."""
    return max(shares, key=shares.__getitem__)


@pytest.mark.parametrize(
    ("slow", "activity"), [("data", "data"), ("begin", "other"), ("end", "other"), ("save", "save")]
)
def test_a_wait_counts_where_it_is_and_as_late_on_the_other_rank(
    two: Any, slow: str, activity: str, tmp_path: Any
) -> None:
    (num0, shares0, sum0), (num1, shares1, sum1) = two(shares_of_fit, slow, 1, str(tmp_path))
    assert (num0, num1) == (BATCHES, BATCHES)
    assert largest(shares1) == activity
    assert largest(shares0) == "late"
    assert sum0 == pytest.approx(1)
    assert sum1 == pytest.approx(1)


def test_passes_that_only_accumulate_do_not_count_as_steps(two: Any) -> None:
    assert [num for num, _, _ in two(shares_of_fit, "", 2)] == [BATCHES // 2] * 2


def test_a_loop_that_applies_gradients_itself_has_a_step_for_each(two: Any) -> None:
    def fn(hvd: Any) -> tuple[int, str]:
        import time

        import keras

        from hvd_cluster.monitor.step_clock import step_clock

        variable = keras.Variable([1.0, 2.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        step_clock.restart()
        for _ in range(5):
            time.sleep(0.02)  # as forward and backward
            optimizer.apply([keras.ops.ones(2)], [variable])
        steps = hvd.step_times()
        shares = {name: sum(getattr(step, f"{name}_s") for step in steps) for name in ACTIVITIES}
        return step_clock.num_steps, max(shares, key=shares.__getitem__)

    assert two(fn) == [(5, "compute")] * 2
