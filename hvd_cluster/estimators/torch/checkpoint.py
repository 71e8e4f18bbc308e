"""A run's state after an epoch, in the store: one file, whole or absent."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.torch.cpu_copies import on_cpu
from hvd_cluster.estimators.torch.optimizer_state import rates, scale_initial_rates, set_rates

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import TrainSpec


@dataclass(frozen=True)
class Running:
    """How far an epoch has come, for a checkpoint within it."""

    #: Rows of the epoch that all ranks together have trained on.
    rows: int
    #: What each rank has added up for the means, shape (ranks, numbers).
    sums: torch.Tensor
    #: The random generators of each rank; see :mod:`hvd_cluster.estimators.torch.random_state`.
    random: list[dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """What resuming takes."""

    model: dict[str, Any]
    #: State of the optimizer, with the rate of one worker: a run may be resumed by another number of them.
    optimizer: dict[str, Any]
    #: The rates that ``size`` workers used, so that the same number goes on with exactly those.
    scaled_rates: list[float]
    size: int
    #: Finished epochs.
    epochs: int
    history: list[dict[str, Any]]
    #: What it was trained on; None in files of before there was one.
    trained_on: Fingerprint | None = None
    #: State of the scheduler and of the gradients' scaler, where there are such.
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    #: Where the next epoch stands; None at its beginning, when random generators are seeded anew.
    running: Running | None = None
    #: Name of the optimizer's class; empty in files of before there was one.
    optimizer_class: str = ""
    #: By what the rates of one worker were multiplied; None in files of before that was kept.
    scale: float | None = None
    #: The rates that the run's optimizer was given at its beginning; None in files of before they were kept.
    given_rates: list[float] | None = None

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        size: int,
        scale: float,
        history: list[dict[str, Any]],
        trained_on: Fingerprint | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        running: Running | None = None,
        given_rates: list[float] | None = None,
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
            trained_on=trained_on,
            scheduler=None if scheduler is None else on_cpu(scheduler.state_dict()),
            scaler=None if scaler is None else on_cpu(scaler.state_dict()),
            running=running,
            optimizer_class=type(optimizer).__name__,
            scale=scale,
            given_rates=given_rates,
        )

    def is_over(self, spec: TrainSpec) -> bool:
        """Whether nothing is left to train."""
        stopping = spec.early_stopping
        return self.epochs >= spec.epochs or (stopping is not None and stopping.is_over(self.history))

    def require_data(self, run_id: str, now: Fingerprint) -> None:
        """Check that a fit goes on with the data that the run began with.

        Raises:
            DataError: it differs; the text says in what.
        """
        if self.trained_on is not None:
            self.trained_on.require(run_id, now)

    def kept_text(self, spec: TrainSpec, size: int) -> str:
        """What ``size`` workers go on with though the fit was given another: the learning rate; empty for no other."""
        now = spec.optimizer.given_rates
        if self.size == size and self.scale not in (None, size if spec.scale_lr else 1.0) and not self.is_over(spec):
            return (
                f"run {spec.run_id!r} goes on with learning rates {self.scale:g} times those of one worker, as it "
                f"began: scale_lr={spec.scale_lr} has no effect, choose another run_id to train with it"
            )
        if self.given_rates is None or self.given_rates == now or self.is_over(spec):
            return ""
        then, given = (", ".join(f"{rate:g}" for rate in each) for each in (self.given_rates, now))
        return (
            f"run {spec.run_id!r} goes on with the learning rate that it began with, {then}: the optimizer's "
            f"lr={given} has no effect, choose another run_id to train with it"
        )

    def restore(
        self,
        run_id: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        size: int,
        scale: float,
        *,
        scheduler: Any = None,
        scaler: Any = None,
    ) -> None:
        """Put the state back, the rates multiplied for ``size`` workers.

        Raises:
            DataError: the checkpoint is of another model or optimizer.
        """
        fresh = [list(one.base_lrs) for one in _with_base_rates(scheduler)]
        fresh_initial = [group.get("initial_lr") for group in optimizer.param_groups]
        own = type(optimizer).__name__  # that of a DistributedOptimizer is the name of what it wraps
        if self.optimizer_class not in {"", own}:  # torch loads it, and fails in the first step
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of the optimizer {self.optimizer_class}, not {own}: choose "
                "another run_id"
            )
        try:
            model.load_state_dict(self.model)
            optimizer.load_state_dict(self.optimizer)
            if scheduler is not None and self.scheduler is not None:
                scheduler.load_state_dict(self.scheduler)
            if scaler is not None and self.scaler is not None:
                scaler.load_state_dict(self.scaler)
        except (RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"run_id={run_id!r} has a checkpoint of another model or optimizer: choose another run_id ({error})"
            ) from error
        if size == self.size:
            set_rates(optimizer, self.scaled_rates)
            return
        set_rates(optimizer, [rate * scale for rate in rates(optimizer)])
        before = self._scale
        for one, made_with in zip(_with_base_rates(scheduler), fresh, strict=True):
            if one.base_lrs != made_with:  # equal ones were given to the scheduler, and go by no number of workers
                one.base_lrs = [rate / before * scale for rate in one.base_lrs]
        for group, initial in zip(optimizer.param_groups, fresh_initial, strict=True):
            if "initial_lr" in group and group["initial_lr"] != initial:
                group["initial_lr"] = group["initial_lr"] / before * scale

    @property
    def _scale(self) -> float:
        """By what the rates of one worker were multiplied; in older files it shows unless a schedule ended at 0."""
        if self.scale is not None:
            return self.scale
        pairs = zip(self.scaled_rates, (group.get("lr", 0.0) for group in self.optimizer["param_groups"]), strict=True)
        return next((scaled / float(rate) for scaled, rate in pairs if rate), 1.0)

    def unscaled_optimizer(self) -> dict[str, Any]:
        """State of the optimizer for another fit, which multiplies again what schedulers begin from."""
        groups = [dict(group) for group in self.optimizer["param_groups"]]
        scale_initial_rates(groups, 1 / self._scale)
        return {**self.optimizer, "param_groups": groups}

    def to_bytes(self) -> bytes:
        content = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaled_rates": self.scaled_rates,
            "size": self.size,
            "epoch": self.epochs,
            "history": json.dumps(self.history),
            "trained_on": json.dumps(self.trained_on.to_dict() if self.trained_on is not None else None),
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "running": None if self.running is None else vars(self.running),
            "optimizer_class": self.optimizer_class,
            "scale": self.scale,
            "given_rates": self.given_rates,
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
            trained_on = json.loads(content.get("trained_on", "null"))
            running = content.get("running")
            return cls(
                model=content["model"],
                optimizer=content["optimizer"],
                scaled_rates=content["scaled_rates"],
                size=content["size"],
                epochs=content["epoch"],
                history=json.loads(content["history"]),
                trained_on=None if trained_on is None else Fingerprint(**trained_on),
                scheduler=content.get("scheduler"),
                scaler=content.get("scaler"),
                running=None if running is None else Running(**running),
                optimizer_class=content.get("optimizer_class", ""),
                scale=content.get("scale"),
                given_rates=content.get("given_rates"),
            )
        except Exception as error:  # torch.load and the unpickler raise anything for a foreign file
            raise DataError(
                f"{origin} is not a checkpoint of this run ({error}): delete it, or choose another run_id"
            ) from error

    def save(self, files: RunFiles, best: bool = False) -> None:
        """Keep it as the run's last checkpoint, or as that of its best epoch.

        Raises:
            DataError: the store cannot be written; the text says what is left of the run.
        """
        try:
            files.save(self.to_bytes(), best)
        except DataError as error:
            if kept := _kept_text(files):
                raise DataError(f"{error}; {kept}") from error.__cause__
            raise

    @classmethod
    def load(cls, files: RunFiles) -> Checkpoint | None:
        """The run's last checkpoint, or None."""
        blob = files.last()
        return None if blob is None else cls.from_bytes(blob, f"the checkpoint of run {files.run_id!r}")


def _with_base_rates(scheduler: Any) -> list[Any]:
    """A scheduler and those that it is made of, as far as they begin from the optimizer's rates; none of None."""
    found = [scheduler] if hasattr(scheduler, "base_lrs") else []
    return [*found, *(one for child in getattr(scheduler, "_schedulers", ()) for one in _with_base_rates(child))]


def _kept_text(files: RunFiles) -> str:
    """What is there of a run whose next checkpoint cannot be written; files are written whole or not at all."""
    try:
        last = Checkpoint.load(files)
    except (OSError, DataError):  # what could not be written is the one to tell
        return ""
    if last is None:
        return ""
    where = f"of epoch {last.epochs}" if last.running is None else f"amid epoch {last.epochs + 1}"
    return f"the checkpoint {where} is kept: run again with run_id={files.run_id!r}"
