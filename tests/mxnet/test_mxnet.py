"""Collectives, trainer and optimizer of MXNet on two real ranks, in their own environment (``make matrix-mxnet``)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hvd_cluster.launch.local import Executor

needs_mxnet = pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: make matrix-mxnet has it")


def _initialised(fn: Callable[..., Any]) -> Any:
    import hvd_cluster.mxnet as hvd

    hvd.init()
    return fn(hvd)


@pytest.fixture(scope="module")
def two() -> Iterator[Callable[..., list[Any]]]:
    """Call ``two(fn)``: runs ``fn(hvd)`` on two initialised ranks and returns both results."""
    with Executor(2, env={"OMP_NUM_THREADS": "1"}) as executor:
        yield lambda fn: executor.run(_initialised, (fn,))


def test_without_mxnet_one_line_says_what_is_missing() -> None:
    code = "import sys; sys.modules['mxnet'] = None; import hvd_cluster.mxnet"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: hvd_cluster.mxnet needs mxnet 1.9.1, which imports beside numpy 1.23 only")


@needs_mxnet
def test_each_collective_gives_its_numbers(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import mxnet as mx

        r = hvd.rank()
        a = mx.nd.array([1.0, 2.0]) * (r + 1)
        in_place = a.copy()
        same = hvd.allreduce_(in_place, op=hvd.Sum, name="in place") is in_place
        rows, received = hvd.alltoall(mx.nd.arange(4) + 10 * r, splits=[1, 2] if r == 0 else [2, 1])
        numpy_like = hvd.allreduce(mx.np.ones((2,)), op=hvd.Sum)
        hvd.barrier()
        return [
            hvd.allreduce(a, priority=3).asnumpy().tolist(),
            hvd.allreduce(a, op=hvd.Max, prescale_factor=2.0).asnumpy().tolist(),
            in_place.asnumpy().tolist(),
            same,
            [each.asnumpy().tolist() for each in hvd.grouped_allreduce([a, a * 10], op=hvd.Sum)],
            hvd.allgather(mx.nd.ones((r + 1, 1)) * r).asnumpy().ravel().tolist(),
            hvd.broadcast(a, 1).asnumpy().tolist(),
            rows.asnumpy().tolist(),
            received.asnumpy().tolist(),
            hvd.reducescatter(mx.nd.arange(4), op=hvd.Sum).asnumpy().tolist(),
            isinstance(numpy_like, mx.np.ndarray),
            hvd.broadcast_object({"rank": r}, 1),
            hvd.allgather_object(r),
        ]

    shared = [[1.5, 3.0], [4.0, 8.0], [3.0, 6.0], True, [[3.0, 6.0], [30.0, 60.0]], [0.0, 1.0, 1.0], [2.0, 4.0]]
    rest = [True, {"rank": 1}, [0, 1]]
    assert two(fn) == [
        [*shared, [0.0, 10.0, 11.0], [1, 2], [0.0, 2.0], *rest],
        [*shared, [1.0, 2.0, 12.0], [2, 1], [4.0, 6.0], *rest],
    ]


@needs_mxnet
def test_mismatches_are_told(two: Any) -> None:
    def fn(hvd: Any) -> bool:
        import mxnet as mx

        try:
            hvd.allreduce(mx.nd.ones((2 + hvd.rank(),)), name="shapes")
        except hvd.HorovodInternalError as error:
            return "Mismatched ALLREDUCE tensor shapes" in str(error)
        return False

    assert two(fn) == [True, True]


@needs_mxnet
@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}])
def test_half_batches_with_the_trainer_equal_whole_batches_without(two: Any, options: dict[str, Any]) -> None:
    def fn(hvd: Any) -> list[Any]:
        import mxnet as mx
        import numpy as np

        def trained(rows: slice, trainer_of: Any, seed: int) -> Any:
            mx.random.seed(seed)
            net = mx.gluon.nn.Sequential()
            net.add(mx.gluon.nn.Dense(4, activation="tanh", in_units=3), mx.gluon.nn.Dense(1))  # one shape is deferred
            net.initialize(mx.init.Xavier())
            hvd.broadcast_parameters(net.collect_params(), root_rank=1)
            trainer = trainer_of(net.collect_params())
            generator = np.random.default_rng(0)
            for _ in range(5):
                x, y = generator.normal(size=(8, 3)).astype("f4"), generator.normal(size=(8, 1)).astype("f4")
                with mx.autograd.record():
                    loss = mx.gluon.loss.L2Loss()(net(mx.nd.array(x[rows])), mx.nd.array(y[rows]))
                loss.backward()
                trainer.step(len(x[rows]))
            return np.concatenate([p.data().asnumpy().ravel() for p in net.collect_params().values()])

        half = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        sgd = {"learning_rate": 0.1, "momentum": 0.9}
        ours = trained(half, lambda p: hvd.DistributedTrainer(p, "sgd", sgd, **options), seed=hvd.rank())
        whole = trained(slice(None), lambda p: mx.gluon.Trainer(p, "sgd", sgd), seed=hvd.rank())
        return float(abs(ours - whole).max())

    assert max(two(fn)) < 1e-5


@needs_mxnet
def test_an_optimizer_averages_what_it_is_given(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import mxnet as mx

        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0))
        updater = mx.optimizer.get_updater(optimizer)
        weight = mx.nd.array([1.0])
        updater(0, mx.nd.array([1.0 + hvd.rank()]), weight)
        return [weight.asnumpy().tolist(), optimizer.learning_rate]

    assert two(fn) == [[[-0.5], 1.0]] * 2
