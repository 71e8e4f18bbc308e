"""Random training programs: the weights are exactly those that the sums of all ranks' gradients give."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hvd_cluster.launch import local
from hvd_cluster.torch.compression import Compressor

#: A program in which ranks wait for each other ends with an error that says for what.
QUICK_TO_NOTICE = {
    "OMP_NUM_THREADS": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
}


@dataclass
class Weight:
    """A parameter, and what a program does with it."""

    optimizer: int
    #: The backward pass that reaches it, where one pass is a step's worth of gradients.
    home: int
    #: It is used in every step that reaches its optimizer, and never frozen.
    is_steady: bool
    #: The step from which on ranks may use it.
    first_step: int
    is_sparse: bool
    parameter: torch.nn.Parameter
    #: The value that it must have.
    expected: torch.Tensor
    #: A rank has had a gradient of it.
    is_known: bool = False


@dataclass
class Program:
    """What all ranks do, drawn equally on each of them."""

    draw: random.Random
    #: Of "several optimizers", "uneven passes" or "failing compressor".
    kind: str
    ranks: int

    def __post_init__(self) -> None:
        draw = self.draw
        is_uneven = self.kind == "uneven passes"
        self.passes_per_step, self.passes = draw.choice([(1, 1), (1, 2), (2, 2)] + [(1, 3)] * is_uneven)
        self.optimizers = 1 if is_uneven else draw.randint(1, 3)
        self.has_names = draw.random() < 0.7
        self.fusion_threshold = draw.choice([0, 40, 2**20])
        counts = [self.passes + draw.randint(1, 4) for _ in range(self.optimizers)]
        self.weights = [self._weight(optimizer, i) for optimizer, count in enumerate(counts) for i in range(count)]

    def _weight(self, optimizer: int, index: int) -> Weight:
        draw = self.draw
        is_steady = index < self.passes
        is_sparse = not is_steady and draw.random() < 0.15
        zeros = torch.zeros(4, 2) if is_sparse else torch.zeros(draw.choice([2, 3, 5]))
        home = index if is_steady else draw.randrange(self.passes)
        first_step = 0 if is_steady else draw.choice([0, 0, 0, 2, 3, 4, 99])
        return Weight(optimizer, home, is_steady, first_step, is_sparse, torch.nn.Parameter(zeros), zeros.clone())

    def freeze(self) -> list[set[int]]:
        """For each rank the weights that it freezes in the next step."""
        return [
            {i for i, w in enumerate(self.weights) if not w.is_steady and w.is_known and self.draw.random() < 0.3}
            for _ in range(self.ranks)
        ]

    def factors(self, step: int, frozen: list[set[int]]) -> dict[tuple[int, int, int], int]:
        """By backward pass, weight and rank: the factor of the weight in the loss; in each pass all ranks reach equal
        optimizers, or some ranks do fewer passes."""
        draw, found = self.draw, dict[tuple[int, int, int], int]()
        reached = [[step == 0 or draw.random() < 0.8 for _ in range(self.passes)] for _ in range(self.optimizers)]
        is_short = self.kind == "uneven passes" and step > 0
        passes = [draw.choice([self.passes, draw.randint(0, self.passes)]) if is_short else self.passes for _ in frozen]
        for number in range(self.passes):
            for optimizer in (o for o in range(self.optimizers) if reached[o][number]):
                may_be_new = all(reached[optimizer]) and (self.passes == 1 or min(passes) == self.passes)
                for rank in (r for r in range(self.ranks) if number < passes[r]):
                    usable = [
                        i
                        for i, w in enumerate(self.weights)
                        if w.optimizer == optimizer
                        and i not in frozen[rank]
                        and w.first_step <= step
                        and (w.home == number or self.passes_per_step > 1)
                        and (w.is_known or may_be_new)
                    ]
                    count = len(usable) if step == 0 else draw.choice([1, draw.randint(1, len(usable))])
                    found |= {(number, i, rank): draw.randint(1, 9) for i in draw.sample(usable, count)}
        return found


def run_program(hvd: Any, program: Program) -> None:
    """Run a program on this rank, and check the weights after each step."""
    draw, weights, me = program.draw, program.weights, hvd.rank()
    failures: list[int] = []

    class Failing(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if failures:
                failures[0] -= 1
                if failures[0] < 0:
                    failures.clear()
                    raise torch.OutOfMemoryError("for the test")
            return tensor, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor

    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(program.fusion_threshold)
    optimizers = []
    for number in range(program.optimizers):
        mine = {f"{i}": w.parameter for i, w in enumerate(weights) if w.optimizer == number}
        optimizers.append(
            hvd.DistributedOptimizer(
                torch.optim.SGD(list(mine.values()), lr=1.0),
                mine.items() if program.has_names else None,
                compression=Failing if program.kind == "failing compressor" else hvd.Compression.none,
                backward_passes_per_step=program.passes_per_step,
                op=hvd.Sum,
            )
        )
    for step in range(draw.randint(3, 9)):
        frozen = program.freeze()
        factors = program.factors(step, frozen)
        for i, weight in enumerate(weights):
            weight.parameter.requires_grad_(i not in frozen[me])
        for number in range(program.passes):
            loss = torch.zeros(())
            for (its_pass, i, rank), factor in factors.items():
                if (its_pass, rank) == (number, me):
                    value: torch.Tensor = weights[i].parameter
                    if weights[i].is_sparse:
                        value = torch.nn.functional.embedding(torch.tensor([me, 3]), value, sparse=True)
                    loss = loss + factor * value.sum()
            if loss.requires_grad:
                loss.backward()
        order = draw.sample(optimizers, len(optimizers))
        fails = [draw.choice([[], [draw.randint(0, 2)]]) for _ in range(program.ranks)]
        for optimizer in order:
            failures[:] = fails[me]
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                optimizer.step()
            failures.clear()
        for optimizer in order:
            optimizer.zero_grad()
        for (_, i, rank), factor in factors.items():
            weights[i].is_known = True
            expected = weights[i].expected
            for part in (expected[rank], expected[3]) if weights[i].is_sparse else (expected,):
                part -= factor
        for i, weight in enumerate(weights):
            assert torch.equal(weight.parameter, weight.expected), (step, i, weight, factors, frozen)


@pytest.mark.parametrize("kind", ["several optimizers", "uneven passes", "failing compressor"])
@pytest.mark.parametrize(
    ("ranks", "programs"), [(2, 20), *(pytest.param(ranks, 200, marks=pytest.mark.slow) for ranks in (2, 3))]
)
def test_random_programs_have_the_weights_of_all_gradients(kind: str, ranks: int, programs: int) -> None:
    def fn(seeds: range) -> None:
        import hvd_cluster.torch as hvd

        hvd.init()
        for seed in seeds:
            try:
                run_program(hvd, Program(random.Random(seed), kind, ranks))
            except Exception as error:
                raise AssertionError(f"program {seed}") from error

    local.run(fn, (range(ranks * 1000, ranks * 1000 + programs),), num_proc=ranks, env=QUICK_TO_NOTICE)
