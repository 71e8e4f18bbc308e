"""A run's state after an epoch, in the store: one file, whole or absent."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import torch

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.optimizer_state import rates, set_rates


@dataclass(frozen=True)
class Checkpoint:
    """What resuming takes. Random generators are seeded anew in each epoch, so they are not part of it."""

    model: dict[str, Any]
    #: State of the optimizer, with the rate of one worker: a run may be resumed by another number of them.
    optimizer: dict[str, Any]
    #: The rates that ``size`` workers used, so that the same number goes on with exactly those.
    scaled_rates: list[float]
    size: int
    #: Finished epochs.
    epochs: int
    history: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        size: int,
        scale: float,
        history: list[dict[str, Any]],
    ) -> Checkpoint:
        """Take the state of a run in which the rates are ``scale`` times those of one worker."""
        scaled = rates(optimizer)
        state = optimizer.state_dict()
        groups = [dict(group) for group in state["param_groups"]]
        for group, rate in zip(groups, scaled, strict=True):
            if "lr" in group:
                group["lr"] = rate / scale
        return cls(
            model=on_cpu(model.state_dict()),
            optimizer=on_cpu({**state, "param_groups": groups}),
            scaled_rates=scaled,
            size=size,
            epochs=len(history),
            history=history,
        )

    def restore(
        self, run_id: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int, scale: float
    ) -> None:
        """Put the state back, the rates multiplied for ``size`` workers.

        Raises:
            DataError: the checkpoint is of another model or optimizer.
        """
        try:
            model.load_state_dict(self.model)
            optimizer.load_state_dict(self.optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of another model or optimizer: choose another run_id ({error})"
            ) from error
        set_rates(optimizer, self.scaled_rates if size == self.size else [rate * scale for rate in rates(optimizer)])

    def to_bytes(self) -> bytes:
        content = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaled_rates": self.scaled_rates,
            "size": self.size,
            "epoch": self.epochs,
            "history": json.dumps(self.history),
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, blob: bytes, origin: str) -> Checkpoint:
        """Read what :meth:`to_bytes` wrote; nothing in it is executed.

        Raises:
            DataError: ``origin`` holds something else.
        """
        try:
            content = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
            return cls(
                model=content["model"],
                optimizer=content["optimizer"],
                scaled_rates=content["scaled_rates"],
                size=content["size"],
                epochs=content["epoch"],
                history=json.loads(content["history"]),
            )
        except Exception as error:  # torch.load and the unpickler raise anything for a foreign file
            raise DataError(
                f"{origin} is not a checkpoint of this run ({error}): delete it, or choose another run_id"
            ) from error

    def save(self, store: Store, run_id: str) -> None:
        """Write to the run's checkpoint; a no-op in a store that keeps no runs."""
        path = store.get_checkpoint_path(run_id)
        if path is not None:
            store.write(path, self.to_bytes())

    @classmethod
    def load(cls, store: Store, run_id: str) -> Checkpoint | None:
        """The run's last checkpoint, or None."""
        path = store.get_checkpoint_path(run_id)
        if path is None or not store.exists(path):
            return None
        return cls.from_bytes(store.read(path), path)


def on_cpu(state: Any) -> Any:
    """The same nest of dicts and lists with every tensor on the CPU, and numpy's scalars as Python's."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_cpu(value) for value in state)
    return state.item() if type(state).__module__ == "numpy" else state
