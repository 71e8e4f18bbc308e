"""Handwritten digits on several workers, with Horovod's API; here, or on two hosts:

    horovodrun -np 2 python examples/torch_digits.py --epochs 3
    horovodrun -np 4 -H node1:2,node2:2 python examples/torch_digits.py

The data are scikit-learn's 1,797 digits of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.norm = hvd.SyncBatchNorm(16)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, 1, 8, 8) -> (N, 10)
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), 0.2, self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (1, 8, 8) in [0, 1] and labels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with horovod.torch")
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05, help="of one worker")
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as halves")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--use-mixed-precision", action="store_true", help="bfloat16 where it is safe")
    parser.add_argument("--batches-per-allreduce", type=int, default=1, help="batches of one step")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--checkpoint", type=Path, help="where rank 0 saves the model after each epoch")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())

    train_set, test_set = digits()
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=256, sampler=test_sampler)

    model = Net().to(device)
    # A step of several workers takes more samples. (Adasum needs no scaling on the CPU.)
    lr_scaler = args.batches_per_allreduce * (1 if args.use_adasum else hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=args.momentum)

    # All workers begin with the same weights and the same optimizer.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        backward_passes_per_step=args.batches_per_allreduce,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for index, (x, y) in enumerate(train_loader, start=1):
            with torch.autocast(device.type, torch.bfloat16, enabled=args.use_mixed_precision):
                loss = F.nll_loss(model(x.to(device)), y.to(device)) / args.batches_per_allreduce
            loss.backward()
            if index % args.batches_per_allreduce == 0:
                optimizer.step()
                optimizer.zero_grad()
            if index % args.log_interval == 0 and hvd.rank() == 0:
                print(f"Train Epoch: {epoch} [{index}/{len(train_loader)}]\tLoss: {loss.item():.6f}")
        if len(train_loader) % args.batches_per_allreduce:
            optimizer.synchronize()  # the last batches are too few for a step
            optimizer.zero_grad()

        model.eval()
        right = total_loss = 0.0
        with torch.no_grad():
            for x, y in test_loader:
                output = model(x.to(device))
                total_loss += F.nll_loss(output, y.to(device), reduction="sum").item()
                right += (output.argmax(dim=1) == y.to(device)).sum().item()
        # The workers' shares are of equal length.
        total_loss = average(total_loss / len(test_sampler), "loss")
        accuracy = average(right / len(test_sampler), "accuracy")
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {total_loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)
            if args.checkpoint is not None:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)
    hvd.shutdown()


if __name__ == "__main__":
    main()
