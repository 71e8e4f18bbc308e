"""A gradient tape that reduces gradients over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_cluster.elastic.keras_model import variables_of_layers
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.reduction_config import Groups, ReductionConfig
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.tensorflow.compression import Compression, Compressor
from hvd_cluster.tensorflow.gradients import GradientReducer, variable_key
from hvd_cluster.tensorflow.timed_calls import time_calls_of_tensorflow


@none_is_default
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape like ``gradtape`` whose ``gradient()`` returns reduced gradients.

    It has the recording of ``gradtape``.

    Args:
        gradtape: a tape; it may still be recording.
        device_dense: accepted and ignored.
        device_sparse: accepted and ignored.
        compression: how gradients are compressed for transfer.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense gradients first.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: divides an average by this before the sum and by the rest after it.
        num_groups: an older name for ``groups`` as a number.
        groups: the number of groups, or lists of variables whose gradients are reduced together. By default as few
            requests as possible.
        process_set: the ranks that take part; other ranks get their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.

    Raises:
        ValueError: the options contradict each other.
    """
    del device_dense, device_sparse
    time_calls_of_tensorflow()
    # A subclass of the wrapped tape's class, so that isinstance() and the class name stay.
    kind: Any = type(type(gradtape).__name__, (_DistributedTape, type(gradtape)), {})
    tape = kind.__new__(kind)
    tape.__dict__.update(gradtape.__dict__)
    tape._reducer = GradientReducer(
        ReductionConfig(
            op=ReduceOp(op),
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            predivide_factor=gradient_predivide_factor,
            groups=groups if groups is not None else num_groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    )
    return tape


@none_is_default
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """:func:`DistributedGradientTape` that does not reduce some layers' gradients.

    Args:
        local_layers: a Keras layer or a list of them, whose trainable weights are excluded from the reduction.

    Raises:
        ValueError: ``local_layers`` contains something else, or the options contradict each other.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape


class _DistributedTape(tf.GradientTape):  # type: ignore[misc,unused-ignore]
    """The methods that precede those of the wrapped tape's class."""

    _reducer: GradientReducer

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of a variable.

        It is divided by the number of ranks if local gradients are scaled.
        """
        self._reducer.local_keys.add(variable_key(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
        **kwargs: Any,
    ) -> Any:
        """The gradients of ``target``, reduced, in the structure of ``sources``.

        None stays None.

        Args:
            target: as for ``tf.GradientTape.gradient``.
            sources: as for ``tf.GradientTape.gradient``.
            output_gradients: as for ``tf.GradientTape.gradient``.
            use_generic_names: a bool is ignored: names do not depend on those of the variables. A
                ``tf.UnconnectedGradients`` is TensorFlow's fourth argument, ``unconnected_gradients``.
            kwargs: as for ``tf.GradientTape.gradient``.
        """
        if isinstance(use_generic_names, tf.UnconnectedGradients):
            kwargs["unconnected_gradients"] = use_generic_names
        flat = tf.nest.flatten(sources)
        own = super().gradient(target, flat, output_gradients, **kwargs)
        reduced = self._reducer(own, flat, "tape")
        if tf.executing_eagerly():
            step_clock.end_step()
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(self, grads: Any, sources: Any) -> tuple[list[Any], list[Any]]:
        """The gradients of local sources, and the reduced gradients of the others.

        Each is in the order of ``sources``.
        """
        flat = tf.nest.flatten(sources)
        results = self._reducer(tf.nest.flatten(grads), flat, "tape")
        pairs = list(zip(results, flat, strict=True))
        local = [grad for grad, source in pairs if variable_key(source) in self._reducer.local_keys]
        return local, [grad for grad, source in pairs if variable_key(source) not in self._reducer.local_keys]
