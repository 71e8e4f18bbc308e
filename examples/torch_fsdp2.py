"""A small transformer whose weights, gradients and optimizer state are sharded by FSDP2, on the backend of hvd_cluster:

    hvdrun -np 2 python examples/torch_fsdp2.py --steps 60

It learns to continue a sequence of numbers that repeats itself; the sequences are made up, nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import hvd_cluster.torch as hvd

NUM_TOKENS, LENGTH, WIDTH = 16, 24, 64


class Net(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (N, LENGTH) -> (N, LENGTH, NUM_TOKENS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        x = self.tokens(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def sequences(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, LENGTH + 1): each row repeats four random numbers."""
    motif = torch.randint(0, NUM_TOKENS, (count, 4), generator=generator)
    return motif.repeat(1, LENGTH // 4 + 1)[:, : LENGTH + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="a transformer, sharded by FSDP2")
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("hvd", init_method="hvd://")
    torch.manual_seed(0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())
    net = Net(args.layers).to(device)
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        rows = sequences(args.batch_size, generator).to(device)
        loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"Step {step + 1}: Loss: {mean.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
