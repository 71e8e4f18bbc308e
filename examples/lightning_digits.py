"""Handwritten digits with a Lightning Trainer: hvdrun -np 2 python examples/lightning_digits.py"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hvd_cluster.torch as hvd
from hvd_cluster.lightning import HorovodStrategy


class Digits(pl.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()

    hvd.init()
    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, test = torch.utils.data.random_split(data, [1437, 360])
    trainer = pl.Trainer(
        strategy=HorovodStrategy(compression=hvd.Compression.bf16),
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Digits(rate=0.002 * hvd.size()),
        DataLoader(train, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(test, batch_size=64),
    )
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} on {trainer.world_size} workers")


if __name__ == "__main__":
    main()
