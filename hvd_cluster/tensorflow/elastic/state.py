"""The state of a TensorFlow training function: variables and picklable values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_cluster.elastic.keras_model import built_optimizer, model_variables
from hvd_cluster.elastic.notification import agree_on_update
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.engine import basics
from hvd_cluster.tensorflow.collectives.broadcast import broadcast_
from hvd_cluster.tensorflow.functions import broadcast_object
from hvd_cluster.tensorflow.gradient_accumulation import ACCUMULATION_VARIABLES


class TensorFlowState(ObjectState):
    """Variables and picklable values as attributes.

    For example ``TensorFlowState(variables, epoch=0, batch=0)``.

    Args:
        variables: TensorFlow or Keras variables; in a v1 graph, by default its global variables. The accumulated
            gradients of the graph's optimizers are added: build the graph and initialize its local variables first.
        session: the session that holds the variables; v1 graphs only.
        kwargs: the attributes and their first values.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        super().__init__(broadcast_object, basics.rank, **kwargs)
        self.session = session
        graph = tf.compat.v1.get_default_graph() if session is None else session.graph
        if variables is None:
            variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        self.variables = [*variables, *([] if session is None else graph.get_collection(ACCUMULATION_VARIABLES))]
        self._values: list[npt.NDArray[Any]] = []
        self._graph_ops: Any = None
        self.save()

    def save(self) -> None:
        """Copy all values into this process's memory."""
        self._values = [np.array(value) for value in self._read()]
        super().save()

    def restore(self) -> None:
        """Restore the values that were saved last."""
        if self.session is None:
            for variable, value in zip(self._current_variables(), self._values, strict=True):
                variable.assign(value)
        else:
            with self.session.graph.as_default():
                for variable, value in zip(self.variables, self._values, strict=True):
                    variable.load(value, self.session)
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's values to all ranks, and save them."""
        if self.session is None:
            broadcast_(self._current_variables(), 0)
        else:
            if self._graph_ops is None:
                with self.session.graph.as_default():
                    self._graph_ops = broadcast_(self.variables, 0)
            self.session.run(self._graph_ops)
        super().sync()

    def _current_variables(self) -> list[Any]:
        """The current variables; an optimizer may create some in the first step."""
        return self.variables

    def _read(self) -> list[Any]:
        if self.session is not None:
            return list(self.session.run(self.variables))
        return [variable.numpy() for variable in self._current_variables()]

    def _agree(self, update: tuple[float, float, int]) -> tuple[float, float, int]:
        return agree_on_update(update)


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer and picklable values as attributes.

    Args:
        model: a built model.
        optimizer: by default the optimizer that the model was compiled with, if any.
        backend: accepted and ignored.
        kwargs: the attributes and their first values.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        self.model = model
        self.optimizer = built_optimizer(model, optimizer, "TensorFlowKerasState")
        super().__init__([], None, **kwargs)

    def _current_variables(self) -> list[Any]:
        return model_variables(self.model, self.optimizer)
