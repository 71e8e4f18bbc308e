"""Trains with Lightning on a ParquetReader, goes on from a checkpoint, and prints as JSON which rows it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from hvd_cluster.data.reader import ParquetReader


class Counts(pl.LightningModule):
    """Keeps the rows of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: dict[str, Any], index: int) -> Any:
        self.seen.setdefault(self.current_epoch, []).extend(batch["id"].tolist())
        return self.weight * batch["id"].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def fit(
    folder: Path, max_epochs: int, *, wrapped: bool = False, callbacks: Any = (), resumed: Path | None = None
) -> dict[str, Any]:
    """Train; the number of steps, and the rows of each epoch."""
    reader = ParquetReader(folder / "rows.parquet", batch_size=4)
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Counts()
    trainer.fit(module, DataLoader(reader, batch_size=None) if wrapped else reader, ckpt_path=resumed)
    return {"steps": trainer.global_step, "seen": module.seen}


def main() -> None:
    """The argument is a folder with ``rows.parquet``, in which checkpoints may be written."""
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]  # Lightning would start Open MPI's daemon
    folder = Path(sys.argv[1])
    wrapped, plain = fit(folder, 3, wrapped=True), fit(folder, 3)
    fit(folder, 2, callbacks=[pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)])
    resumed = {step: fit(folder, 3, resumed=folder / f"step={step}.ckpt") for step in (10, 15)}
    print(json.dumps({"wrapped": wrapped, "plain": plain, "resumed": resumed}))


if __name__ == "__main__":
    main()
