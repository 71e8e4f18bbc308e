"""The tape and the optimizers: two ranks on half batches equal one process on whole batches."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_tape_gives_reduced_gradients_in_the_structure_of_its_sources(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        r = hvd.rank()
        a, b, unused = tf.Variable([1.0, 2.0]), tf.Variable(3.0), tf.Variable(0.0)

        def step():
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(a * (r + 1.0)) + b * b * (r + 1.0)
            return tape.gradient(loss, {"a": a, "rest": [b, unused]})

        found = []
        for run in (step, tf.function(step)):
            gradients = run()
            assert gradients["rest"][1] is None
            found.append([gradients["a"].numpy().tolist(), float(gradients["rest"][0])])
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(a * (r + 1.0))
        wrapped = hvd.DistributedGradientTape(plain, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert isinstance(wrapped, tf.GradientTape)
        return [*found, wrapped.gradient(loss, a).numpy().tolist()]

    assert two(fn) == [[[[1.5, 1.5], 9.0]] * 2 + [[3.0, 3.0]]] * 2


@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"num_groups": 1}, {"gradient_predivide_factor": 4.0}, {"sparse_as_dense": True}],
)
def test_options_of_a_tape_change_the_way_and_not_the_result(two: Any, options: dict[str, Any]) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        table, w, v = tf.Variable(tf.ones([4, 2])), tf.Variable([[1.0], [2.0]]), tf.Variable(1.0)

        @tf.function
        def step():
            with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                rows = tf.gather(table, [hvd.rank(), 3])
                loss = tf.reduce_sum(rows @ w) * v * (1.0 + hvd.rank())
            return [tf.convert_to_tensor(g) for g in tape.gradient(loss, [table, w, v])]

        return [g.numpy().tolist() for g in step()]

    rows = [[0.5, 1.0], [1.0, 2.0], [0.0, 0.0], [1.5, 3.0]]
    assert two(fn) == [[rows, [[3.0], [3.0]], 9.0]] * 2


def test_ranks_with_gradients_of_different_variables_take_part_with_zeros(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        is_first = hvd.rank() == 0
        a, b, unused = (tf.Variable([1.0, 1.0]) for _ in range(3))
        table = tf.Variable([[1.0], [1.0]])

        def gradients(loss: Any, variables: list[Any]) -> list[Any]:
            with tf.GradientTape() as tape:
                value = loss()
            return [
                None if each is None else [type(each).__name__, tf.convert_to_tensor(each).numpy().tolist()]
                for each in hvd.DistributedGradientTape(tape).gradient(value, variables)
            ]

        return [
            # Of equal shapes, so that nothing else shows that they are different ones.
            gradients(lambda: tf.reduce_sum((a if is_first else b) * (1.0 + hvd.rank())), [a, b, unused]),
            # One rank has none at all.
            gradients(lambda: tf.reduce_sum(a) if is_first else tf.constant(1.0), [a, unused]),
            # Sparse and dense; sparse and none.
            gradients(lambda: tf.reduce_sum(tf.gather(table, [0]) if is_first else table), [table]),
            gradients(lambda: tf.reduce_sum(tf.gather(table, [0]) if is_first else a), [table, a]),
            # Once more, with the same ones: the numbers of the requests still fit.
            gradients(lambda: tf.reduce_sum(a * b), [a, b]),
        ]

    dense, sparse = "EagerTensor", "IndexedSlices"
    assert (
        two(fn)
        == [
            [
                [[dense, [0.5, 0.5]], [dense, [1.0, 1.0]], None],
                [[dense, [0.5, 0.5]], None],
                [[dense, [[1.0], [0.5]]]],
                [[sparse, [[0.5], [0.0]]], [dense, [0.5, 0.5]]],
                [[dense, [1.0, 1.0]], [dense, [1.0, 1.0]]],
            ]
        ]
        * 2
    )


def test_ranks_whose_graphs_have_gradients_of_different_variables_are_an_error(two: Any) -> None:
    def fn(hvd: Any) -> str:
        import tensorflow as tf

        a, b = tf.Variable([1.0]), tf.Variable([1.0])

        @tf.function
        def step():
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(a if hvd.rank() == 0 else b)
            return [gradient for gradient in tape.gradient(loss, [a, b]) if gradient is not None]

        with pytest.raises(tf.errors.UnknownError) as caught:
            step()
        return str(caught.value)

    for text in two(fn):
        assert "Mismatched members of a group" in text


def test_groups_of_variables_and_local_sources(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        a, b, c = (tf.Variable([1.0]) for _ in range(3))
        with hvd.DistributedGradientTape(tf.GradientTape(), groups=[[c, a]]) as tape:
            loss = tf.reduce_sum(a + 2.0 * b + 3.0 * c) * (hvd.rank() + 1.0)
        tape.register_local_source(b)
        return [g.numpy().tolist() for g in tape.gradient(loss, [a, b, c])]

    assert two(fn) == [[[1.5], [1.0], [4.5]], [[1.5], [2.0], [4.5]]]


def test_a_partial_tape_leaves_its_layers_alone(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import tensorflow as tf

        local = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        local.build((None, 1))
        w = tf.Variable([[1.0]])
        inner = tf.GradientTape()
        with hvd.PartialDistributedGradientTape(inner, local_layers=local, scale_local_gradients=False) as tape:
            loss = tf.reduce_sum(local(w)) * (hvd.rank() + 1.0)
        sources = [w, *[v.value for v in local.trainable_variables]]
        found = [float(tf.squeeze(g)) for g in tape.gradient(loss, sources)]
        try:
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["no layer"])
        except ValueError as error:
            return [*found, "Keras layers" in str(error)]
        return found

    assert two(fn) == [[1.5, 1.0, True], [1.5, 2.0, True]]


def test_many_gradients_are_one_request(two: Any) -> None:
    def fn(hvd: Any) -> int:
        import tensorflow as tf

        from hvd_cluster.engine import basics

        variables = [tf.Variable([float(i)]) for i in range(50)]

        @tf.function
        def step():
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.add_n([v[0] * v[0] for v in variables])
            return tape.gradient(loss, variables)

        engine = basics.engine()
        submitted, submit = [], engine.submit

        def counted(request: Any, **options: Any) -> Any:
            submitted.append(request.name)
            return submit(request, **options)

        engine.submit = counted
        try:
            step()
        finally:
            del engine.submit
        return len(submitted)

    assert two(fn) == [1, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_half_batches_on_two_ranks_equal_whole_batches_on_one(two: Any, compiled: bool) -> None:
    def fn(hvd: Any) -> float:
        import keras
        import numpy as np
        import tensorflow as tf

        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(5, 8, 4)).astype("f4"), rng.normal(size=(5, 8, 1)).astype("f4")

        def trained(share: slice, tape_of: Any) -> Any:
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
            optimizer = keras.optimizers.Adam(0.05)
            optimizer.build(model.trainable_variables)

            def step(a, b):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(a, training=True) - b))
                gradients = tape_of(tape).gradient(loss, [v.value for v in model.trainable_variables])
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            step = tf.function(step) if compiled else step
            for a, b in zip(x, y, strict=True):
                step(tf.constant(a[share]), tf.constant(b[share]))
            return np.concatenate([w.ravel() for w in model.get_weights()])

        r = hvd.rank()
        together = trained(slice(4 * r, 4 * r + 4), hvd.DistributedGradientTape)
        alone = trained(slice(None), lambda tape: tape)
        return float(np.abs(together - alone).max())

    assert max(two(fn)) < 1e-5


def test_sync_batch_normalization_normalises_over_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import keras
        import numpy as np
        import tensorflow as tf

        whole = np.random.default_rng(0).normal(size=(8, 3)).astype("f4")
        mine = tf.constant(whole[4 * hvd.rank() : 4 * hvd.rank() + 4])
        ours, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
        with tf.GradientTape() as tape:
            tape.watch(mine)
            out = ours(mine, training=True)
            loss = tf.reduce_sum(out * out * out)
        everything = tf.constant(whole)
        with tf.GradientTape() as whole_tape:
            whole_tape.watch(everything)
            expected = plain(everything, training=True)
            whole_loss = tf.reduce_sum(expected * expected * expected)
        share = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
        gradient = whole_tape.gradient(whole_loss, everything)[share]
        errors = [
            np.abs(out - expected[share]).max(),
            np.abs(ours.moving_variance - plain.moving_variance).max(),
            np.abs(tape.gradient(loss, mine) - gradient).max(),
        ]
        try:
            hvd.SyncBatchNormalization(fused=True)
        except ValueError:
            return [float(error) for error in errors]
        return []

    for errors in two(fn):
        assert max(errors) < 1e-5


@pytest.mark.parametrize("mode", ["eager", "function", "v1"])
@pytest.mark.parametrize("passes", [1, 2])
def test_adasum_combines_the_steps_that_the_ranks_take_alone(two: Any, mode: str, passes: int) -> None:
    def fn(hvd: Any) -> list[Any]:
        import numpy as np
        import tensorflow.compat.v1 as tf

        generator = np.random.default_rng(hvd.rank())
        gradients = generator.normal(size=(4, 3)).astype("float32")
        options = {"op": hvd.Adasum, "backward_passes_per_step": passes}

        def stepped(optimizer: Any) -> Any:
            """The weights after each step."""
            seen = []
            if mode == "v1":
                with tf.Graph().as_default(), tf.Session() as session:
                    w = tf.get_variable("w", initializer=tf.constant([1.0, 2.0, 3.0]))
                    gradient = tf.placeholder(tf.float32, [3])
                    step = tf.train.get_or_create_global_step()
                    train = optimizer.apply_gradients([(gradient, w)], global_step=step)
                    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                    for each in gradients:
                        session.run(train, {gradient: each})
                        seen.append(session.run(w))
                    assert session.run(step) == 4
                return np.stack(seen)
            w = tf.Variable([1.0, 2.0, 3.0])

            def apply(gradient: Any) -> None:
                optimizer.apply_gradients([(gradient, w)])

            apply = tf.function(apply) if mode == "function" else apply
            for each in gradients:
                apply(tf.constant(each))
                seen.append(w.numpy())
            return np.stack(seen)

        ours = stepped(hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.1, momentum=0.9), **options))
        expected, w, start = [], np.float32([1.0, 2.0, 3.0]), None
        velocity = np.zeros(3, "float32")
        for number, gradient in enumerate(gradients):
            start = w if number % passes == 0 else start
            velocity = np.float32(0.9) * velocity + gradient
            w = w - np.float32(0.1) * velocity
            if (number + 1) % passes == 0:
                a, b = hvd.allgather((w - start)[None]).numpy().astype("float64")
                dot = a @ b
                w = (start + a * (1 - dot / (2 * a @ a)) + b * (1 - dot / (2 * b @ b))).astype("float32")
            expected.append(w)
        return [float(abs(ours - np.stack(expected)).max()), ours[-1].tolist()]

    (error, weights), (other_error, others) = two(fn)
    assert max(error, other_error) < 1e-5
    assert weights == others


def test_what_adasum_cannot_do_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> list[str]:
        import keras
        import tensorflow as tf

        sgd = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        found = []
        for act in (
            lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum),
            lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum, average_aggregated_gradients=True),
            lambda: hvd.DistributedOptimizer(sgd, op=hvd.Adasum, gradient_predivide_factor=2.0),
            lambda: hvd.DistributedOptimizer(sgd, gradient_predivide_factor=0.0),
            lambda: hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=0),
            lambda: hvd.DistributedOptimizer(sgd, op=hvd.Max),
            lambda: hvd.DistributedOptimizer("sgd"),
        ):
            try:
                act()
            except ValueError as error:
                found.append(type(error).__name__)
        return found

    assert two(fn) == [["ValueError"] * 7] * 2


def test_a_rank_outside_a_process_set_keeps_its_own_gradients(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import tensorflow as tf

        alone = hvd.add_process_set([1])
        rate = 2.0 + hvd.rank()
        variable = tf.Variable([1.0])
        local = tf.keras.layers.Dense(1, use_bias=False)
        local.build((1, 1))

        def tape(wrap: Any) -> Any:
            with tf.GradientTape() as plain:
                loss = tf.reduce_sum(variable * rate) + tf.reduce_sum(local.kernel * rate)
            return wrap(plain, process_set=alone).gradient(loss, [variable, local.kernel.value])

        def partial(plain: Any, **options: Any) -> Any:
            return hvd.PartialDistributedGradientTape(plain, local_layers=[local], **options)

        def stepped(optimizer: Any) -> list[float]:
            stepping = tf.Variable([0.0])
            for _ in range(2):
                pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(stepping * rate), [stepping])
                optimizer.apply_gradients(pairs)
            return stepping.numpy().tolist()

        def v1(**options: Any) -> Any:
            return hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0), process_set=alone, **options
            )

        keras_optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), process_set=alone)
        weight = tf.Variable([0.0])
        keras_optimizer.apply_gradients([(tf.constant([rate]), weight)])
        try:
            found = [
                [float(tf.reduce_sum(each)) for each in run(wrap)]
                for wrap in (hvd.DistributedGradientTape, partial)
                for run in (tape, tf.function(tape))
            ]
            return [*found, stepped(v1()), stepped(v1(backward_passes_per_step=2)), weight.numpy().tolist()]
        finally:
            hvd.remove_process_set(alone)

    def expected(rate: float) -> list[Any]:
        return [[rate, rate]] * 4 + [[-2 * rate], [-2 * rate], [-rate]]

    assert two(fn) == [expected(2.0), expected(3.0)]


def test_the_fourth_argument_of_gradient_may_be_tensorflows(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import tensorflow as tf

        used, unused = tf.Variable(1.0), tf.Variable(2.0)
        with tf.GradientTape() as tape:
            loss = used * (hvd.rank() + 1.0)
        tape = hvd.DistributedGradientTape(tape)
        return [float(each) for each in tape.gradient(loss, [used, unused], None, tf.UnconnectedGradients.ZERO)]

    assert two(fn) == [[1.5, 0.0]] * 2
