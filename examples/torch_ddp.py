"""Handwritten digits with torch's DistributedDataParallel on the backend of hvd_cluster; here, or on two hosts:

    hvdrun -np 2 python examples/torch_ddp.py --epochs 3
    hvdrun -np 4 -H node1:2,node2:2 python examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py

The data are scikit-learn's 1,797 digits of 8 x 8 pixels; nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvd_cluster.torch as hvd


def digits() -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """The training set, and the images and labels of the test set."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), (x[test], y[test])


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits with DistributedDataParallel")
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    dist.init_process_group("hvd", init_method="hvd://")
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train, (images, labels) = digits()
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            mine = slice(dist.get_rank(), None, dist.get_world_size())
            right = (model(images[mine].to(device)).argmax(1).cpu() == labels[mine]).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch + 1}: Accuracy: {100 * right.item() / len(labels):.1f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
