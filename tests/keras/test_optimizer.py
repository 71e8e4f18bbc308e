"""``model.fit`` on two ranks, on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def trained(hvd: Any, optimizer: Any, *, whole: bool, epochs: int = 2, **options: Any) -> Any:
    """The weights after a fit: on this rank's half of each batch, or on whole batches without any reduction."""
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 4)).astype("float32")
    y = rng.normal(size=(4, 8, 1)).astype("float32")
    share = slice(None) if whole else slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    x, y = x[:, share].reshape(-1, 4), y[:, share].reshape(-1, 1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    if not whole:
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=8 if whole else 4, epochs=epochs, shuffle=False, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_half_batches_on_two_ranks_equal_whole_batches_on_one(two: Any, name: str) -> None:
    train = trained

    def fn(hvd: Any) -> float:
        import keras

        kind = getattr(keras.optimizers, name)
        return float(abs(train(hvd, kind(0.01), whole=False) - train(hvd, kind(0.01), whole=True)).max())

    assert max(two(fn)) < 1e-5


@pytest.mark.parametrize("options", [{"groups": 2}, {"gradient_predivide_factor": 2.0}, {"sparse_as_dense": True}])
def test_options_change_the_way_and_not_the_result(two: Any, options: dict[str, Any]) -> None:
    train = trained

    def fn(hvd: Any) -> float:
        import keras

        distributed = train(hvd, keras.optimizers.SGD(0.05, momentum=0.9), whole=False, **options)
        return float(abs(distributed - train(hvd, keras.optimizers.SGD(0.05, momentum=0.9), whole=True)).max())

    assert max(two(fn)) < 1e-5


def test_compression_and_sum(two: Any) -> None:
    train = trained

    def fn(hvd: Any) -> float:
        import keras

        compressed = train(hvd, keras.optimizers.SGD(0.02), whole=False, op=hvd.Sum, compression=hvd.Compression.fp16)
        return float(abs(compressed - train(hvd, keras.optimizers.SGD(0.04), whole=True)).max())

    assert max(two(fn)) < 1e-3


def test_several_passes_make_one_step(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        import keras

        w = keras.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        seen = []
        for value in (1.0, 2.0, 3.0, 4.0):
            optimizer.apply([keras.ops.convert_to_tensor([value * (hvd.rank() + 1)])], [w])
            seen.append(float(keras.ops.convert_to_numpy(w)[0]))
        return [seen, int(keras.ops.convert_to_numpy(optimizer.iterations))]

    assert two(fn) == [[[1.0, -3.5, -3.5, -14.0], 4]] * 2


def test_passes_that_are_left_make_a_step_of_their_own(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        import keras

        w = keras.Variable([1.0])
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        seen = []
        for values in [(1.0, 2.0, 3.0), (4.0, 1.0), (2.0,)]:
            for value in values:
                optimizer.apply([keras.ops.convert_to_tensor([value * (hvd.rank() + 1)])], [w])
            optimizer.complete_passes()
            seen.append(float(keras.ops.convert_to_numpy(w)[0]))
        return [seen, int(keras.ops.convert_to_numpy(optimizer.iterations))]

    # Means of two ranks: 2.25 and 4.5 from three passes, 3.75 from two, 3 from one.
    assert two(fn) == [[[-5.75, -9.5, -12.5], 6]] * 2


def test_passes_are_aggregated_in_a_compiled_fit(two: Any) -> None:
    train = trained

    def fn(hvd: Any) -> float:
        import keras

        sgd = keras.optimizers.SGD(0.05, momentum=0.9)
        ours = train(hvd, sgd, whole=False, backward_passes_per_step=2, average_aggregated_gradients=True)
        # Keras's own accumulation averages too.
        theirs = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)
        return float(abs(ours - train(hvd, theirs, whole=True)).max())

    assert max(two(fn)) < 1e-5


def test_passes_that_make_no_step_yet_reduce_nothing(two: Any) -> None:
    train = trained

    def fn(hvd: Any) -> int:
        import keras

        from hvd_cluster.engine import basics

        engine = basics.engine()
        submitted, submit = [], engine.submit

        def counted(request: Any, **options: Any) -> Any:
            submitted.append(request.name)
            return submit(request, **options)

        engine.submit = counted
        try:
            train(hvd, keras.optimizers.SGD(0.05), whole=False, epochs=3, backward_passes_per_step=4)
        finally:
            del engine.submit
        return len(submitted)

    assert two(fn) == [3, 3]  # of 12 batches


def test_local_layers_are_left_to_each_rank(two: Any) -> None:
    def fn(hvd: Any) -> list[bool]:
        import keras
        import numpy as np

        keras.utils.set_random_seed(1)
        local = keras.layers.Dense(3, use_bias=False)
        model = keras.Sequential([keras.Input((4,)), local, keras.layers.Dense(1, use_bias=False)])
        x = np.random.default_rng(hvd.rank()).normal(size=(16, 4)).astype("float32")
        model.compile(hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=[local]), "mse")
        model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0)
        mine, shared = (hvd.allgather(weight[None]) for weight in model.get_weights())
        return [bool((mine[0] == mine[1]).all()), bool((shared[0] == shared[1]).all())]

    assert two(fn) == [[False, True]] * 2


def test_a_step_that_was_compiled_in_one_world_is_right_in_the_next(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import os

        import keras
        import numpy as np

        rank = hvd.rank()
        local, shared = (keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2))
        inputs = [keras.Input((1,)), keras.Input((1,))]
        model = keras.Model(inputs, keras.layers.Add()([local(inputs[0]), shared(inputs[1])]))
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[local])
        model.compile(optimizer, lambda _, out: -out)
        ones = np.full((1, 1), 1.0 + rank, "float32")

        def step() -> list[float]:
            model.fit([ones, ones], ones, verbose=0)
            return [float(weight[0, 0]) for weight in model.get_weights()]

        hvd.shutdown()
        hvd.init(comm=[rank])
        os.environ["HOROVOD_ELASTIC"] = "1"  # compiled as in an elastic job, whose world may grow
        try:
            alone = step()
        finally:
            del os.environ["HOROVOD_ELASTIC"]
            hvd.shutdown()
            hvd.init()
        return [alone, step()]

    assert two(fn) == [[[1.0, 1.0], [1.5, 2.5]], [[2.0, 2.0], [3.0, 3.5]]]


def test_a_variable_that_the_sums_do_not_know_is_named(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras

        v, w = keras.Variable([1.0], name="known"), keras.Variable([1.0], name="also_known")
        one = keras.ops.convert_to_tensor([1.0 + hvd.rank()])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        optimizer.apply([one, one], [v, w])
        optimizer.apply([one, None], [v, w])  # the sum of the first pass is applied all the same
        found = [float(keras.ops.convert_to_numpy(each)[0]) for each in (v, w)]
        try:
            optimizer.apply([one], [keras.Variable([1.0], name="stranger")])
        except ValueError as error:
            found.append("stranger" in str(error) and "one optimizer for each set of variables" in str(error))
        return found

    assert two(fn) == [[-2.0, -0.5, True]] * 2


def test_the_state_of_a_wrapped_optimizer_is_kept(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras

        w = keras.Variable([1.0])
        plain = keras.optimizers.SGD(0.5, momentum=0.5)
        plain.apply([keras.ops.convert_to_tensor([1.0])], [w])
        wrapped = hvd.DistributedOptimizer(plain)
        wrapped.apply([keras.ops.convert_to_tensor([2.0 * hvd.rank()])], [w])
        found = [float(keras.ops.convert_to_numpy(w)[0]), int(keras.ops.convert_to_numpy(wrapped.iterations))]
        return [*found, isinstance(wrapped, keras.optimizers.SGD), wrapped.variables() == list(wrapped.variables)]

    # 1 - 0.5 = 0.5 with the velocity -0.5; then 0.5 + (0.5 * -0.5 - 0.5 * 1.0).
    assert two(fn) == [[-0.25, 2, True, True]] * 2


@pytest.mark.parametrize("passes", [1, 2])
def test_a_saved_model_loads_without_us_and_with_us(two: Any, tmp_path: Path, passes: int) -> None:
    def fn(hvd: Any, folder: str) -> list[Any]:
        import json
        import zipfile

        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=passes), "mse")
        x = np.ones((8, 2), "float32")
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
        path = f"{folder}/{hvd.rank()}.keras"
        model.save(path)
        config = zipfile.ZipFile(path).read("config.json").decode()
        saved = json.loads(config)["compile_config"]["optimizer"]
        plain = keras.models.load_model(path)
        again = hvd.load_model(path)
        steps = int(keras.ops.convert_to_numpy(again.optimizer.iterations))
        again.fit(x, x[:, :1], batch_size=4, verbose=0)
        after = int(keras.ops.convert_to_numpy(again.optimizer.iterations))
        distributed = hasattr(again.optimizer, "register_local_var")
        return [
            f"{saved['module']}.{saved['class_name']}",
            "hvd_cluster" in config,
            hasattr(plain.optimizer, "register_local_var"),
            distributed,
            steps,
            after,
        ]

    assert two(fn, str(tmp_path)) == [["keras.optimizers.Adam", False, False, True, 2, 4]] * 2


def test_what_cannot_be_meant_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import keras

        sgd = keras.optimizers.SGD(0.1)
        found = []
        for act in (
            lambda: hvd.DistributedOptimizer("sgd"),
            lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum),
            lambda: hvd.DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0),
            lambda: hvd.DistributedOptimizer(sgd, gradient_predivide_factor=0.0),
            lambda: hvd.DistributedOptimizer(sgd, groups=-1),
            lambda: hvd.PartialDistributedOptimizer(sgd, local_layers=["dense"]),
            lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd)),
            lambda: hvd.broadcast_global_variables(0),
        ):
            try:
                act()
            except (ValueError, RuntimeError) as error:
                found.append(type(error).__name__)
        return found

    assert two(fn) == [["ValueError"] * 7 + ["RuntimeError"]] * 2


def test_an_explicit_jit_compile_is_refused_on_tensorflow_and_works_on_jax(two: Any, backend: str) -> None:
    if backend == "torch":
        pytest.skip("jit_compile is torch.compile there, which takes a compiler")

    def fn(hvd: Any) -> bool:
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=True)
        before = model.get_weights()[0]
        x = np.ones((4, 2), "float32")
        try:
            model.fit(x, x[:, :1], verbose=0)
        except ValueError as error:
            return "jit_compile=False" in str(error) and bool((model.get_weights()[0] == before).all())
        return False

    assert two(fn) == [backend == "tensorflow"] * 2
