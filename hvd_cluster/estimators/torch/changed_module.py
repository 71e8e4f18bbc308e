"""Modules whose structure training changes, such as pruned ones.

The fit returns the trained module itself.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvd_cluster.engine.objects import dumps
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.spec import FitSpec
from hvd_cluster.estimators.torch.model_pickling import module_on_cpu, unpicklable_text

logger = logging.getLogger(__name__)

_UNTRAINED_TEXT = (
    "the parameters %s were made after the optimizer: they are not trained, and each rank has its own values of them, "
    "of which those of rank 0 are returned. Make them before the optimizer, in __init__()"
)


def layout(model: torch.nn.Module) -> dict[str, str]:
    """The name and the shape of each entry of the state dict."""
    return {name: _shape(value) for name, value in model.state_dict().items()}


class Structure:
    """The structure of a module of which the driver has a copy.

    The state of a trained module may fit the copy no longer.

    Args:
        model: the module, as it is in the driver.
        spec: of the fit; a module of which workers hold parts cannot be returned.
    """

    def __init__(self, model: torch.nn.Module, spec: FitSpec) -> None:
        self._layout = self._checked = layout(model)
        self._spec = spec

    def differences(self, model: torch.nn.Module) -> list[str]:
        """The names of entries that ``model`` lacks, has in addition or in other shapes."""
        now, given = layout(model), self._layout
        return [name for name in {**now, **given} if now.get(name) != given.get(name)]

    def require_returnable(self, model: torch.nn.Module, optimizers: Iterable[Any]) -> None:
        """Check early that the fit can return what it has trained.

        It warns of new parameters that the fit does not train.

        Raises:
            DataError: training has changed the structure, and the module is divided or cannot be pickled.
        """
        now = layout(model)
        if now == self._checked:
            return
        self._checked, names = now, self.differences(model)
        some = ", ".join(names[:5])
        if names and self._spec.saves_shards:
            param = "communication" if self._spec.sharding == "none" else "sharding"
            raise DataError(
                f"the trained module has other weights than the given one ({some}), which a fit with "
                f"{param}={getattr(self._spec, param)!r} cannot return: make these layers and buffers in __init__(), "
                "in their final shapes"
            )
        if names and (text := unpicklable_text("model", model)):
            raise DataError(
                f"the trained module has other weights than the given one ({some}), so the fit returns the module "
                f"itself, but {text}"
            )
        held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
        parameters = model.named_parameters()
        new = [name for name, one in parameters if name in names and one.requires_grad and id(one) not in held]
        if new:
            logger.warning(_UNTRAINED_TEXT, ", ".join(new[:5]))

    def changed(self, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        """The entries of a result that replace the model's state.

        There are none if the state fits the module of the driver.

        Args:
            model: the trained module, on rank 0.
            optimizer: its optimizer, or None.
        """
        if not self.differences(model):
            return {}
        index = {id(parameter): position for position, parameter in enumerate(model.parameters())}
        groups = [] if optimizer is None else optimizer.param_groups
        positions = [[index.get(id(one), -1) for one in group["params"]] for group in groups]
        pickled = bytearray(dumps(module_on_cpu(model)))
        return {"model": {}, "module": torch.frombuffer(pickled, dtype=torch.uint8), "positions": positions}


def trained_module(state: Mapping[str, Any]) -> tuple[torch.nn.Module, Sequence[Sequence[int]] | None] | None:
    """A worker's trained module, and the positions of its optimizer's parameters.

    This is None if the worker's result lacks a module. The positions are None if the optimizer holds parameters that
    the module has no longer.
    """
    if "module" not in state:
        return None
    positions: list[list[int]] = state["positions"]
    is_known = all(position >= 0 for group in positions for position in group)
    return pickle.loads(state["module"].numpy().tobytes()), positions if is_known else None


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return "no shape yet" if torch.nn.parameter.is_lazy(value) else str(tuple(value.shape))
