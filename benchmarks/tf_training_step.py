"""TensorFlow on 2 ranks: a step of an MLP (784-2048-2048-10, batch 64) in a tf.function, ours and
tf.distribute.MultiWorkerMirroredStrategy's; and what an allreduce in a tf.function costs more than the engine's own.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.measure import Table, compare, row, seconds
from benchmarks.report import Report, Reports
from hvd_cluster.launch import local
from hvd_cluster.rendezvous.sockets import ReservedPort

BATCH = 64
Step = Callable[[], object]


def worker(ports: list[int]) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Both measurements; the strategy wants to be made before anything else of TensorFlow."""
    import tensorflow as tf

    import hvd_cluster.tensorflow as hvd

    hvd.init()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": hvd.rank()}})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    training = compare(_our_step(tf, hvd), _step_of_strategy(tf, strategy), turns=15, per_turn=3)
    collective = _allreduces(tf, hvd)
    hvd.shutdown()
    return training, collective


def _net(tf: Any) -> tuple[list[Any], Callable[[], Any]]:
    """The variables and the loss of one batch; the same for both, in plain TensorFlow."""
    random = tf.random.Generator.from_seed(0)
    widths = [784, 2048, 2048, 10]
    weights = [tf.Variable(random.normal([rows, columns], stddev=rows**-0.5)) for rows, columns in pairwise(widths)]
    biases = [tf.Variable(tf.zeros([columns])) for columns in widths[1:]]
    x = tf.constant(random.normal([BATCH, 784]))
    y = tf.constant(random.uniform([BATCH], 0, 10, tf.int64))

    def loss() -> Any:
        hidden = x
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            hidden = tf.nn.relu(hidden @ weight + bias)
        logits = hidden @ weights[-1] + biases[-1]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    return [*weights, *biases], loss


def _our_step(tf: Any, hvd: Any) -> Step:
    variables, loss = _net(tf)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)

    @tf.function
    def step() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            value = loss()
        gradients = tape.gradient(value, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return value

    return lambda: step().numpy()


def _step_of_strategy(tf: Any, strategy: Any) -> Step:
    with strategy.scope():
        variables, loss = _net(tf)
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01 / strategy.num_replicas_in_sync)

    def on_replica() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        gradients = tape.gradient(value, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))  # sums over the replicas
        return value

    @tf.function
    def step() -> Any:
        return strategy.run(on_replica)

    return lambda: step().numpy()


def _allreduces(tf: Any, hvd: Any) -> dict[str, dict[str, list[float]]]:
    """Seconds for one allreduce of 4 KB, each beside as many of the engine's own: of twenty in a row, of one alone."""
    import torch

    import hvd_cluster.torch as engine

    ours, bare, repeated = tf.ones([1024]), torch.ones(1024), 20

    def reduced(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    def several(x: Any) -> Any:
        for _ in range(repeated):
            x = reduced(x)
        return x

    def alone(count: int) -> Any:
        x = bare
        for _ in range(count):
            x = engine.allreduce(x, op=engine.Sum)
        return x

    found = {}
    for name, call, count in (
        ("several", tf.function(several), repeated),
        ("one", tf.function(reduced), 1),
        ("eager", reduced, 1),
    ):
        times = compare(
            lambda call=call: call(ours).numpy(), lambda count=count: alone(count), turns=21, per_turn=10 // count or 1
        )
        found[name] = {of: [time_s / count for time_s in each] for of, each in times.items()}
    return found


def measure() -> Reports:
    with ReservedPort() as first, ReservedPort() as second:
        ports = [first.port, second.port]
    env = {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    training, collective = local.run(worker, (ports,), num_proc=2, env=env)[0]
    labels = {
        "several": "in a tf.function, one of twenty in a row on either side",
        "one": "a tf.function with nothing else, its call included",
        "eager": "eagerly",
    }
    rows = []
    for name, label in labels.items():
        times = collective[name]
        more_s = [ours_s - alone_s for ours_s, alone_s in zip(times["ours"], times["peer"], strict=True)]
        medians = [seconds(statistics.median(times[of])) for of in ("ours", "peer")]
        rows.append([label, *medians, f"{statistics.median(more_s) * 1e3:+.2f} ms"])
    columns = ["", "ours", "the engine alone (hvd_cluster.torch)", "more"]
    return Reports(
        [
            Table("A training step of TensorFlow", "MultiWorkerMirroredStrategy", [row("2 ranks", training)]),
            Report("One allreduce of 4 KB in TensorFlow", columns, rows),
        ]
    )
