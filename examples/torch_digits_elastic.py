"""Handwritten digits on workers that may come and go, with Horovod's API:

    echo 'echo localhost:2' > hosts.sh && chmod +x hosts.sh
    horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python examples/torch_digits_elastic.py

Change what the script prints while it runs: workers start and stop, and no batch is trained twice. On two hosts that do
not change it also survives the loss of one of them:

    horovodrun -np 4 --min-np 2 -H node1:2,node2:2 python examples/torch_digits_elastic.py

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


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (64,) in [0, 1] and labels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with elastic horovod.torch")
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.05, help="of one worker")
    parser.add_argument("--batches-per-commit", type=int, default=10, help="what a lost worker may cost")
    parser.add_argument("--checkpoint", type=Path, help="where rank 0 saves the model in the end")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())

    train_set, test_set = digits()
    # Deals what is left of an epoch to the workers that are there.
    sampler = hvd.elastic.ElasticSampler(train_set)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def on_state_reset() -> None:
        """The number of workers has changed, and with it the samples of a step."""
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        # After a change of the workers it is called again, and continues from the last commit.
        while state.epoch < args.epochs:
            model.train()
            loader = DataLoader(train_set, batch_size=args.batch_size, sampler=state.sampler)
            for index, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(index, args.batch_size)
                if (index + 1) % args.batches_per_commit == 0:
                    state.commit()
            if hvd.rank() == 0:
                print(f"Train Epoch: {state.epoch} on {hvd.size()} workers\tLoss: {loss.item():.6f}", flush=True)
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)

    if hvd.rank() == 0:
        model.eval()
        x, y = (tensor.to(device) for tensor in test_set.tensors)
        with torch.no_grad():
            accuracy = (model(x).argmax(dim=1) == y).float().mean().item()
        print(f"Test set: Accuracy: {100 * accuracy:.2f}% with {hvd.size()} workers", flush=True)
        if args.checkpoint is not None:
            torch.save(model.state_dict(), args.checkpoint)
    hvd.shutdown()


if __name__ == "__main__":
    main()
