"""A transformer of ten million parameters on two hosts with a link of 100 Mbit/s: `communication=DiLoCo(...)` against
DDP on Gloo, with equal tokens. The hosts are namespaces of this machine (benchmarks/hosts.py).

Times are of steps over the link, with the exchange at the end of a round. The losses are those of both after the same
steps from the same weights in two processes of this host, where DDP need not wait for the link; the text is a Markov
chain.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.hosts import Hosts, missing
from benchmarks.measure import row, seconds
from benchmarks.report import Report
from hvd_cluster.estimators import DiLoCo
from hvd_cluster.launch import local

RATE_MBIT = 100.0
VOCABULARY, LENGTH, ROWS = 256, 64, 4
WIDTH, NUM_LAYERS = 384, 6
COMMUNICATION = DiLoCo(every=100, outer_lr=0.7, outer_momentum=0.5)
#: Steps whose losses are compared.
NUM_STEPS = 300
#: Rounds and steps of DDP that are timed, in turns.
TURNS, DDP_STEPS = 3, 4


class Transformer(nn.Module):
    """Predicts the next of each sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.tokens(tokens) + self.places.weight
        found: torch.Tensor = self.last(self.layers(embedded, self.mask, is_causal=True))
        return found


def batches(rank: int, number: int) -> torch.Tensor:
    """Sequences of a Markov chain in which each token has four successors: (number, ROWS, LENGTH + 1)."""
    chain = torch.Generator().manual_seed(0)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=chain)
    own = torch.Generator().manual_seed(1 + rank)
    choices = torch.multinomial(
        torch.tensor([0.6, 0.2, 0.1, 0.1]), number * ROWS * LENGTH, replacement=True, generator=own
    )
    text = [torch.randint(VOCABULARY, (number * ROWS,), generator=own)]
    for choice in choices.view(LENGTH, -1):
        text.append(successors[text[-1], choice])
    return torch.stack(text, 1).view(number, ROWS, LENGTH + 1)


class Trainer:
    """A copy of the model, in one of the two ways."""

    def __init__(self, net: nn.Module, in_rounds: bool, group: Any) -> None:
        import torch.distributed as dist

        from hvd_cluster.estimators.torch.strategies.rounds import rounds_of

        own = copy.deepcopy(net)
        self.model = own if in_rounds else nn.parallel.DistributedDataParallel(own, process_group=group)
        base = torch.optim.AdamW(own.parameters(), lr=1e-3)
        self.optimizer = rounds_of(COMMUNICATION, base, dist.get_rank()) if in_rounds else base

    def step(self, tokens: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(tokens).backward()
        self.optimizer.step()

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trainers() -> tuple[int, Trainer, Trainer]:
    """The rank, and one of each."""
    import torch.distributed as dist

    import hvd_cluster.torch as hvd

    hvd.init()
    dist.init_process_group("hvd")
    torch.manual_seed(0)
    net = Transformer()
    return hvd.rank(), Trainer(net, True, None), Trainer(net, False, dist.new_group(backend="gloo"))


def timed() -> tuple[dict[str, list[float]], int]:
    """Seconds per step in each turn, and the number of parameters."""
    rank, ours, peer = trainers()
    data = batches(rank, COMMUNICATION.every)
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    peer.step(data[0])
    for _ in range(TURNS):
        for name, trainer, steps in (("ours", ours, COMMUNICATION.every), ("peer", peer, DDP_STEPS)):
            began_s = time.perf_counter()
            for tokens in data[:steps]:
                trainer.step(tokens)
            times[name].append((time.perf_counter() - began_s) / steps)
    return times, sum(one.numel() for one in ours.model.parameters())


def learned() -> tuple[float, float]:
    """The losses of both on other sequences, after equal steps."""
    rank, ours, peer = trainers()
    data, others = batches(rank, NUM_STEPS), batches(100, 16)
    for tokens in data:
        ours.step(tokens)
        peer.step(tokens)
    with torch.no_grad():
        mine, theirs = (torch.stack([trainer.loss(one) for one in others]).mean().item() for trainer in (ours, peer))
    return mine, theirs


def measure() -> Report:
    title = f"Slow links: {RATE_MBIT:g} Mbit/s between two hosts"
    if reason := missing():
        return Report(title, ["not run"], [(reason,)])
    env = {"OMP_NUM_THREADS": "1"}
    with Hosts(2, rate_mbit=RATE_MBIT) as hosts:
        times, parameters = hosts.run(timed, ranks=[1, 1], env={**env, "GLOO_SOCKET_IFNAME": "eth0"})[0]
    mine, theirs = local.run(learned, num_proc=2, env=env)[0]
    found = row("", times)
    rows = [
        (f"`{COMMUNICATION}`", seconds(found.ours_s), f"{mine:.4f}"),
        ("DDP on Gloo", seconds(found.peer_s), f"{theirs:.4f}"),
    ]
    spread = f"{found.ratio:.1f}x ({found.ratio_low:.1f} to {found.ratio_high:.1f})"
    notes = [
        f"{spread} as many tokens per second, with a loss that differs by {mine / theirs - 1:+.2%}.",
        f"{parameters / 1e6:.1f} million parameters; {ROWS * LENGTH} tokens in a step of a rank.",
    ]
    columns = ["communication", "a step over the link", f"validation loss after {NUM_STEPS} equal steps"]
    return Report(title, columns, rows, notes)
