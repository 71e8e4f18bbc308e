"""The state of a TensorFlow training function: variables and plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_cluster.elastic.keras_model import built_optimizer, model_variables
from hvd_cluster.elastic.news import agreed_news
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.engine import basics
from hvd_cluster.tensorflow.aggregation import PASS_VARIABLES
from hvd_cluster.tensorflow.collectives.broadcast import broadcast_
from hvd_cluster.tensorflow.functions import broadcast_object


class TensorFlowState(ObjectState):
    """Variables, and values that can be pickled, as attributes: ``TensorFlowState(variables, epoch=0, batch=0)``.

    Args:
        variables: of TensorFlow or Keras; in a v1 graph by default its global ones. What an optimizer of the graph
            keeps between passes is added to them: build the graph, and initialise its local variables, first.
        session: the session that holds them; v1 graphs only.
        kwargs: the attributes and their first values.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        super().__init__(broadcast_object, basics.rank, **kwargs)
        self.session = session
        graph = tf.compat.v1.get_default_graph() if session is None else session.graph
        if variables is None:
            variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        self.variables = [*variables, *([] if session is None else graph.get_collection(PASS_VARIABLES))]
        self._values: list[npt.NDArray[Any]] = []
        self._graph_ops: Any = None
        self.save()

    def save(self) -> None:
        """Copy everything into this process's memory."""
        self._values = [np.array(value) for value in self._read()]
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        if self.session is None:
            for variable, value in zip(self._present(), self._values, strict=True):
                variable.assign(value)
        else:
            with self.session.graph.as_default():
                for variable, value in zip(self.variables, self._values, strict=True):
                    variable.load(value, self.session)
        super().restore()

    def sync(self) -> None:
        """Make everything that of rank 0, and save it."""
        if self.session is None:
            broadcast_(self._present(), 0)
        else:
            if self._graph_ops is None:
                with self.session.graph.as_default():
                    self._graph_ops = broadcast_(self.variables, 0)
            self.session.run(self._graph_ops)
        super().sync()

    def _present(self) -> list[Any]:
        """The variables of now; those of an optimizer come to be in the first step."""
        return self.variables

    def _read(self) -> list[Any]:
        if self.session is not None:
            return list(self.session.run(self.variables))
        return [variable.numpy() for variable in self._present()]

    def _agree(self, news: tuple[float, float, int]) -> tuple[float, float, int]:
        return agreed_news(news)


class TensorFlowKerasState(TensorFlowState):
    """A Keras model and its optimizer, and values that can be pickled, as attributes.

    Args:
        model: a built model.
        optimizer: by default the model's own, if it is compiled.
        backend: accepted, and without effect.
        kwargs: the attributes and their first values.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        self.model = model
        self.optimizer = built_optimizer(model, optimizer, "TensorFlowKerasState")
        super().__init__([], None, **kwargs)

    def _present(self) -> list[Any]:
        return model_variables(self.model, self.optimizer)
