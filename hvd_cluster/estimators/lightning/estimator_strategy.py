"""HorovodStrategy for the checkpoints of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_cluster.estimators.lightning.spec import LightningSpec
from hvd_cluster.estimators.run.worker_run import WorkerRun
from hvd_cluster.estimators.torch import made_state
from hvd_cluster.estimators.torch.checkpoint import shards_of
from hvd_cluster.estimators.torch.model_source import ModelSource
from hvd_cluster.lightning import HorovodStrategy

_HorovodStrategy: Any = HorovodStrategy


class EstimatorStrategy(_HorovodStrategy):
    """HorovodStrategy whose checkpoints leave out what a factory makes.

    Checkpoints of the user's ModelCheckpoint leave it out too.

    Args:
        run: on this worker; it may continue from a checkpoint whose tensors are in shards.
        options: those of HorovodStrategy.
    """

    #: Only this process reads shards, not all ranks together.
    reads_alone = True
    #: Whether checkpoints hold all of the module, also what the factory makes.
    saves_all = False

    def __init__(self, run: WorkerRun[LightningSpec], **options: Any) -> None:
        super().__init__(**options)
        spec, found = run.spec, run.resumed
        self._run = run
        self._shards = None if found is None else shards_of(spec.store, spec.run_id, found.state)
        #: What the factory makes of the trainer's module; None without a factory.
        self._made: dict[str, str] | None = None
        if isinstance(spec.model, ModelSource):
            prefix = "" if spec.objective is None else "net."
            self._made = {f"{prefix}{name}": text for name, text in spec.model.made.items()}
        is_whole = self._made is None or self.saves_all
        self._trained_part = None if is_whole else made_state.TrainedPart(self._made or {})

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the checkpoint is loaded into the module and the optimizers that train."""
        return self._shards is not None

    def equalize(self) -> None:
        """Make the weights of all ranks equal; every rank takes part."""

    def saved_state(self) -> dict[str, Any]:
        """The part of the module's state to save, with this rank's parts of parameters."""
        module = self.lightning_module
        return module.state_dict() if self._trained_part is None else self._trained_part.of(module)

    def _initial_state(self) -> dict[str, Any]:
        equal = set[str]() if self._made is None else made_state.equal_names(self._made)
        return {name: value for name, value in super()._initial_state().items() if name not in equal}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The part of the state that is saved."""
        return self.saved_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load such a part, or this rank's part of it."""
        module, state = self.lightning_module, checkpoint["state_dict"]
        if self._shards is not None:
            from hvd_cluster.estimators.torch.strategies.parts import load_model

            load_model(module, self._shards, state, is_whole=self._made is None, alone=self.reads_alone)
        elif self._trained_part is not None:
            made_state.load(module, state)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, or this rank's parts of them."""
        if self._shards is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        from hvd_cluster.estimators.torch.strategies.parts import load_optimizer, name_in_shards

        for number, (optimizer, rest) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            name_in_shards(optimizer, number)
            load_optimizer(optimizer, self._shards, rest, alone=self.reads_alone)
