"""What the step clock measures in loops of TensorFlow on two ranks."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ACTIVITIES = ("data", "compute", "late", "transfer", "optimizer", "save", "other")


def largest_of_loop(hvd: Any, compiled: bool, sparse: bool, slow: str) -> tuple[int, str, float]:
    """Number of steps, the largest activity and the sum of the shares of a tape's loop in which rank 1 waits."""
    import time

    import tensorflow as tf

    from hvd_cluster.monitor.step_clock import step_clock

    table, weight = tf.Variable(tf.ones((8, 4))), tf.Variable(tf.ones((4, 1)))
    hvd.DistributedGradientTape(tf.GradientTape())  # from now on data sets are timed

    def batches() -> Any:
        for _ in range(10):
            if slow == "data" and hvd.rank() == 1:
                time.sleep(0.12)
            yield [0, 1, 2]

    def train_step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            x = tf.gather(table, rows) if sparse else tf.ones((3, 4))
            loss = tf.reduce_mean(x @ weight)
        sources = [table, weight] if sparse else [weight]
        for variable, gradient in zip(sources, hvd.DistributedGradientTape(tape).gradient(loss, sources), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    step = tf.function(train_step) if compiled else train_step
    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec((3,), tf.int32))
    step(tf.constant([0, 1, 2]))
    step_clock.restart()
    for rows in dataset:
        step(rows)
        if slow == "logging" and hvd.rank() == 1:
            time.sleep(0.12)
    steps = hvd.step_times()
    total = sum(each.total_s for each in steps)
    shares = {name: sum(getattr(each, f"{name}_s") for each in steps) / total for name in ACTIVITIES}
    return step_clock.num_steps, max(shares, key=shares.__getitem__), sum(shares.values())


@pytest.mark.parametrize(("slow", "activity"), [("data", "data"), ("logging", "other")])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_wait_counts_where_it_is_and_as_late_on_the_other_rank(
    two: Any, compiled: bool, sparse: bool, slow: str, activity: str
) -> None:
    (num0, largest0, sum0), (num1, largest1, sum1) = two(largest_of_loop, compiled, sparse, slow)
    assert (num0, num1) == (10, 10)
    assert (largest0, largest1) == ("late", activity)
    assert (sum0, sum1) == (pytest.approx(1), pytest.approx(1))
