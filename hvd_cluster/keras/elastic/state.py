"""The state of a Keras function: a model, its optimizer, picklable values."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt

import hvd_cluster.torch as hvd
from hvd_cluster.elastic.keras_model import built_optimizer, model_variables
from hvd_cluster.elastic.notification import agree_on_update
from hvd_cluster.elastic.state import ObjectState
from hvd_cluster.errors import HostsUpdatedInterrupt
from hvd_cluster.keras.reduction import forget_failed_step
from hvd_cluster.keras.values import broadcast_variables


class KerasState(ObjectState):
    """A model, its optimizer and picklable values as attributes.

    For example ``KerasState(model, epoch=0)``.

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
        self.optimizer = built_optimizer(model, optimizer, "KerasState")
        super().__init__(hvd.broadcast_object, hvd.rank, **kwargs)
        self.model = model
        self._values: list[npt.NDArray[Any]] = []
        self._own_values: list[tuple[Any, npt.NDArray[Any]]] = []
        #: The weights when the hosts were found to have changed, until :meth:`reset`.
        self._interrupted: list[tuple[Any, npt.NDArray[Any]]] = []
        self.save()

    def save(self) -> None:
        """Copy all values into this process's memory."""
        variables = model_variables(self.model, self.optimizer)
        self._values = [_copied(variable) for variable in variables]
        shared = {id(variable) for variable in variables}
        # Seeds and metric sums of this rank: a failing JAX step has already donated their memory.
        self._own_values = [(each, _copied(each)) for each in self.model.variables if id(each) not in shared]
        super().save()

    def restore(self) -> None:
        """Restore the values that were saved last."""
        forget_failed_step()
        self._interrupted = []
        for variable, value in zip(model_variables(self.model, self.optimizer), self._values, strict=True):
            variable.assign(value)
        for variable, value in self._own_values:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's values to all ranks, and save them."""
        broadcast_variables(model_variables(self.model, self.optimizer), 0)
        super().sync()

    def check_host_updates(self) -> None:
        """Check whether the hosts have changed, as :meth:`State.check_host_updates`.

        Raises:
            HostsUpdatedInterrupt: they have; raised on all ranks.
        """
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            # Only on JAX does a fit also end with the averages of ``use_ema`` as weights if an exception ends it.
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
                self._interrupted = [(each, _copied(each)) for each in self.model.trainable_variables]
            raise

    def reset(self) -> None:
        """Undo what the end of an interrupted fit did to the weights."""
        for variable, value in self._interrupted:
            variable.assign(value)
        self._interrupted = []

    def _agree(self, update: tuple[float, float, int]) -> tuple[float, float, int]:
        return agree_on_update(update)


def _copied(variable: Any) -> npt.NDArray[Any]:
    return np.array(keras.ops.convert_to_numpy(variable))
