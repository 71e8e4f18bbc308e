"""What few programs ask of an optimizer, on each backend: gradients that come and go, groups, classes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("passes", [[True, False, False, True], [False, True, True, False]])
def test_a_gradient_that_is_missing_in_one_trace_loses_nothing(two: Any, backend: str, passes: list[bool]) -> None:
    def fn(hvd: Any) -> list[float]:
        import keras

        a, b = keras.Variable([0.0]), keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        optimizer.build([a, b])

        def step(has_second):
            scale = 1.0 + hvd.rank()
            second = keras.ops.convert_to_tensor([-10.0 * scale]) if has_second else None
            optimizer.apply([keras.ops.convert_to_tensor([-scale]), second], [a, b])

        if backend == "tensorflow":
            import tensorflow as tf

            step = tf.function(step, autograph=False)  # a trace for each of the two
        seen = []
        for has_second in passes:
            step(has_second)
            seen.append(float(keras.ops.convert_to_numpy(b)[0]))
        return [float(keras.ops.convert_to_numpy(a)[0]), *seen]

    assert two(fn) == [[6.0, 0.0, 15.0, 15.0, 30.0]] * 2


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_ranks_that_use_different_layers_average_the_gradients_of_each_with_zeros(
    two: Any, backend: str, compression: str
) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras

        experts = [keras.Variable([0.0]) for _ in range(2)]
        unused = keras.Variable([7.0])
        options = {"compression": getattr(hvd.Compression, compression)}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        gradients: list[Any] = [None, None, None]
        gradients[hvd.rank()] = keras.ops.convert_to_tensor([-2.0 * (1.0 + hvd.rank())])
        try:
            optimizer.apply(gradients, [*experts, unused])
        except Exception as error:  # noqa: BLE001 - JAX's own, where the reduction is a callback
            return [str(error)]
        return [float(keras.ops.convert_to_numpy(each)[0]) for each in (*experts, unused)]

    for found in two(fn):
        if backend == "jax":
            assert "Mismatched members of a group" in found[0]
        else:
            assert found == [1.0, 2.0, 7.0]


def test_groups_of_variables_and_local_gradients_as_they_are(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import keras

        a, b, c = (keras.Variable([0.0]) for _ in range(3))
        options = {"groups": [[c, a]], "scale_local_gradients": False}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.register_local_var(b)
        scale = 1.0 + hvd.rank()
        optimizer.apply([keras.ops.convert_to_tensor([-number * scale]) for number in (1.0, 2.0, 3.0)], [a, b, c])
        return [float(keras.ops.convert_to_numpy(each)[0]) for each in (a, b, c)]

    assert two(fn) == [[1.5, 2.0, 4.5], [1.5, 4.0, 4.5]]


def test_a_model_loads_with_an_optimizer_of_the_users_own_and_sends_less(two: Any, tmp_path: Path) -> None:
    def fn(hvd: Any, folder: str) -> list[Any]:
        import keras

        class Own(keras.optimizers.SGD):  # type: ignore[misc,unused-ignore]
            """Not Keras's."""

        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
        model.compile(Own(1.0), "mse")
        path = f"{folder}/{hvd.rank()}.keras"
        model.save(path)
        loaded = hvd.load_model(path, custom_optimizers=[Own], compression=hvd.Compression.fp16)
        loaded.optimizer.apply([keras.ops.convert_to_tensor([[-1.0 - 2.0**-20]])], loaded.trainable_variables)
        return [isinstance(loaded.optimizer, Own), float(loaded.get_weights()[0][0, 0])]

    assert two(fn, str(tmp_path)) == [[True, 1.0]] * 2  # float16 has not the last bits


@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_made_of_the_configuration_of_another_is_distributed_too(two: Any, passes: int) -> None:
    def fn(hvd: Any) -> list[float]:
        import keras

        options = {"op": hvd.Sum, "backward_passes_per_step": passes, "scale_local_gradients": False}
        first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        _, local = variables = [keras.Variable([0.0]), keras.Variable([0.0])]
        first.register_local_var(local)
        second = type(first).from_config(first.get_config())
        for optimizer in (first, second):
            for _ in range(passes):
                optimizer.apply([keras.ops.convert_to_tensor([-1.0 - hvd.rank()])] * 2, variables)
        return [float(keras.ops.convert_to_numpy(variable)[0]) for variable in variables]

    assert two(fn) == [[6.0 * passes, 2.0 * passes], [6.0 * passes, 4.0 * passes]]


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_deep_copy_is_distributed_too(two: Any, is_scaled: bool, passes: int) -> None:
    def fn(hvd: Any, is_scaled: bool, passes: int) -> list[float]:
        import copy

        import keras

        plain = keras.optimizers.SGD(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(plain, initial_scale=2.0) if is_scaled else plain
        options = {"op": hvd.Sum, "backward_passes_per_step": passes}
        twin = copy.deepcopy(hvd.DistributedOptimizer(optimizer, **options))
        if is_scaled:  # which JAX refuses to apply outside a compiled step
            assert twin.initial_scale == 2.0
            twin = twin.inner_optimizer
        variable = keras.Variable([0.0])
        for _ in range(passes):
            twin.apply([keras.ops.convert_to_tensor([-2.0 * (1.0 + hvd.rank())])], [variable])
        return [float(keras.ops.convert_to_numpy(variable)[0])]

    assert two(fn, is_scaled, passes) == [[6.0 * passes]] * 2


@pytest.mark.parametrize("is_scaled", [False, True])
def test_optimizers_made_of_the_same_one_are_independent(two: Any, backend: str, is_scaled: bool) -> None:
    if is_scaled and backend == "jax":
        pytest.skip("Keras scales no loss eagerly on JAX")

    def fn(hvd: Any) -> list[list[float]]:
        import keras

        base = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.1))
        if is_scaled:
            base = keras.optimizers.LossScaleOptimizer(base)
        found = []
        for _ in range(2):  # the folds of a cross-validation
            weight = keras.Variable([0.0])
            optimizer = hvd.DistributedOptimizer(base)
            optimizer.build([weight])
            for _ in range(3):
                optimizer.apply([keras.ops.convert_to_tensor([1.0])], [weight])
            steps = float(keras.ops.convert_to_numpy(getattr(optimizer, "inner_optimizer", optimizer).iterations))
            found.append([steps, len(optimizer.variables), float(keras.ops.convert_to_numpy(weight)[0])])
        return found

    for first, second in two(fn):
        assert first == second
        assert first[0] == 3.0


def test_a_registered_optimizer_is_saved_under_its_registered_name(two: Any, tmp_path: Path) -> None:
    def fn(hvd: Any, folder: str) -> list[Any]:
        import json
        import zipfile

        import keras

        @keras.saving.register_keras_serializable(package="users")
        class Registered(keras.optimizers.SGD):  # type: ignore[misc,unused-ignore]
            """Found by its name alone."""

        @keras.saving.register_keras_serializable(package="users")
        class Scaling(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc,unused-ignore]
            """Likewise."""

        found: list[Any] = []
        for optimizer in (Registered(0.1), Scaling(Registered(0.1))):
            configs = []
            for wrap in (lambda plain: plain, hvd.DistributedOptimizer):
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile(wrap(type(optimizer).from_config(optimizer.get_config())), "mse")
                path = f"{folder}/{hvd.rank()}.keras"
                model.save(path)
                config = json.loads(zipfile.ZipFile(path).read("config.json"))["compile_config"]["optimizer"]
                configs.append([config["registered_name"], config["config"].get("inner_optimizer")])
                found.append(type(keras.models.load_model(path).optimizer) is type(optimizer))
            found.append(configs[0] == configs[1])
        return [*found, isinstance(hvd.load_model(path).optimizer, Scaling)]

    assert two(fn, str(tmp_path)) == [[True] * 7] * 2


def test_an_optimizer_without_variables_says_what_keras_says(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import keras

        texts = []
        for wrap in (lambda plain: plain, hvd.DistributedOptimizer):
            try:
                wrap(keras.optimizers.SGD(0.1)).apply([keras.ops.ones((1,))])
            except ValueError as error:
                texts.append(str(error))
        return texts

    for plain, distributed in two(fn):
        assert plain == distributed


def test_what_the_user_calls_beside_a_step_takes_no_number_of_it(two: Any, backend: str) -> None:
    if backend == "tensorflow":
        pytest.skip("a step has the name of its graph there")

    def fn(hvd: Any) -> list[float]:
        import keras
        import numpy as np
        import torch

        import hvd_cluster.torch as hvd_torch

        w = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        gradient = keras.ops.convert_to_tensor([-1.0 - hvd.rank()])

        def step() -> None:
            optimizer.apply([gradient], [w])

        # As where the thread that carries out a step is late on one rank alone.
        if hvd.rank() == 1:
            step()
        begun = hvd_torch.grouped_allreduce_async([torch.ones(1)], op=hvd.Sum)
        if hvd.rank() == 0:
            step()
        (total,) = hvd_torch.synchronize(begun)
        return [float(np.ravel(keras.ops.convert_to_numpy(w))[0]), float(total)]

    assert two(fn) == [[1.5, 2.0]] * 2


def test_a_rank_outside_a_process_set_steps_with_its_own_gradients(two: Any, backend: str) -> None:
    scalings = [False] if backend == "jax" else [False, True]  # Keras scales no loss eagerly there

    def fn(hvd: Any) -> list[float]:
        import keras

        alone = hvd.add_process_set([1])
        found = []
        try:
            for wrap, options in (
                (hvd.DistributedOptimizer, {}),
                (hvd.DistributedOptimizer, {"backward_passes_per_step": 2}),
                (hvd.PartialDistributedOptimizer, {}),
            ):
                for scaled in scalings:
                    variable = keras.Variable([0.0])
                    optimizer = wrap(keras.optimizers.SGD(1.0), process_set=alone, **options)
                    if scaled:
                        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
                    optimizer.build([variable])
                    for _ in range(2):
                        optimizer.apply([keras.ops.convert_to_tensor([-1.0 - hvd.rank()])], [variable])
                    found.append(float(keras.ops.convert_to_numpy(variable)[0]))
        finally:
            hvd.remove_process_set(alone)
        return found

    assert two(fn) == [[number] * 3 * len(scalings) for number in (2.0, 4.0)]


def test_an_optimizer_of_another_package_is_refused_with_what_to_do(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        legacy = type("Adam", (), {"__module__": "tf_keras.src.optimizers.adam"})
        graph = type("AdamOptimizer", (), {"__module__": "tensorflow.python.training.adam"})
        found = []
        for each in (type("Own", (legacy,), {"__module__": "program"}), graph):
            try:
                hvd.DistributedOptimizer(each())
            except ValueError as error:
                found.append(str(error))
        return found

    for keras2, tensorflow1 in two(fn):
        assert "got Own of tf_keras, which is Keras 2: unset TF_USE_LEGACY_KERAS" in keras2
        assert tensorflow1.endswith("AdamOptimizer of TensorFlow 1: use hvd_cluster.tensorflow.DistributedOptimizer")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pickle", "cloudpickle", "deepcopy"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_copy_of_a_compiled_model_has_a_distributed_optimizer(two: Any, how: str, passes: int) -> None:
    def fn(hvd: Any) -> list[Any]:
        import copy
        import pickle

        import cloudpickle
        import keras
        import numpy as np

        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(1, use_bias=False, name=name) for name in ("first", "second", "third")]
        model = keras.Sequential([keras.Input((1,)), *layers])
        weights = model.trainable_variables
        options = {"op": hvd.Sum, "backward_passes_per_step": passes, "groups": [[weights[2], weights[0]]]}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125, momentum=0.5), **options)
        optimizer.register_local_var(weights[1])
        model.compile(optimizer, "mse", jit_compile=False)
        x = np.full((4, 1), 1.0 + hvd.rank(), "float32")
        model.fit(x, -x, batch_size=2, epochs=passes, verbose=0)
        make = {
            "pickle": lambda: pickle.loads(pickle.dumps(model)),
            "cloudpickle": lambda: pickle.loads(cloudpickle.dumps(model)),
            "deepcopy": lambda: copy.deepcopy(model),
        }
        twin = make[how]()
        before = [each.tolist() for each in twin.get_weights()]
        for each in (model, twin):
            each.fit(x, -x, batch_size=2, epochs=passes, verbose=0)
        return [before, [each.tolist() for each in model.get_weights()], [each.tolist() for each in twin.get_weights()]]

    (first, mine, copied), (other, theirs, other_copied) = two(fn)
    assert mine == copied != first
    assert theirs == other_copied != other
    assert [mine[0], mine[2]] == [theirs[0], theirs[2]]
    assert mine[1] != theirs[1]


def test_a_distributed_optimizer_is_pickled_unless_it_needs_variables(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import pickle

        import keras

        plain, variable = keras.optimizers.SGD(1.0), keras.Variable([0.0])
        optimizer = pickle.loads(pickle.dumps(hvd.DistributedOptimizer(plain, op=hvd.Sum)))
        optimizer.apply([keras.ops.convert_to_tensor([-1.0 - hvd.rank()])], [variable])
        scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0))
        copied = pickle.loads(pickle.dumps(scaled))
        optimizer.register_local_var(variable)
        try:
            pickle.dumps(optimizer)
        except TypeError as error:
            return [
                float(keras.ops.convert_to_numpy(variable)[0]),
                type(copied).__mro__[1] is type(scaled).__mro__[1],
                copied.initial_scale,
                str(error),
            ]
        return []

    for weight, is_alike, scale, text in two(fn):
        assert (weight, is_alike, scale) == (3.0, True, 4.0)
        assert "pickle the model that has these variables" in text


def test_a_copy_that_keras_does_not_compile_has_none(two: Any) -> None:
    def fn(hvd: Any) -> list[bool]:
        import copy

        import keras

        @keras.saving.register_keras_serializable(package="users")
        class Own(keras.Model):  # type: ignore[misc,unused-ignore]
            """With a ``compile`` of its own, which Keras does not call where it loads a model."""

            def __init__(self) -> None:
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x: Any) -> Any:
                return self.dense(x)

            def compile(self, optimizer: Any, loss: Any) -> None:
                super().compile(optimizer=optimizer, loss=loss)

            def get_config(self) -> dict[str, Any]:
                return {}

        model = Own()
        model(keras.ops.ones((1, 1)))
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), "mse")
        return [getattr(copy.deepcopy(model), "optimizer", None) is None]

    assert two(fn) == [[True]] * 2


def test_a_copy_shares_its_process_set_and_can_be_copied_and_saved(two: Any, backend: str, tmp_path: Path) -> None:
    def fn(hvd: Any, folder: str) -> list[Any]:
        import copy

        import keras

        process_set = hvd.ProcessSet([0])
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=process_set)
        kernel = model.weights[0]
        optimizer.register_local_var(kernel.value if backend == "tensorflow" else kernel)
        optimizer.register_local_var(keras.Variable([0.0]))  # of another model, which a copy does not train
        model.compile(optimizer, "mse", jit_compile=False)
        twin = copy.deepcopy(model)
        twin.optimizer.clipnorm = 0.5
        path = f"{folder}/{hvd.rank()}.keras"
        twin.save(path)
        copies = [copy.deepcopy(twin), keras.saving.load_model(path), hvd.load_model(path)]
        shared = [each.optimizer._hvd.reduction.config.process_set is process_set for each in (twin, copies[0])]
        local = [list(each.optimizer._hvd.reduction.local_variables.values()) for each in (twin, copies[0])]
        return [
            shared,
            [each.optimizer.clipnorm for each in copies],
            [len(each) for each in local],
            local[0][0] is twin.weights[0],
        ]

    assert two(fn, str(tmp_path)) == [[[True, True], [0.5, 0.5, 0.5], [1, 1], True]] * 2
