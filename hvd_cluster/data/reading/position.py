"""Where a reader stands in its epochs, and the plan of what follows."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.data.dataset import Split
from hvd_cluster.data.reading import shards
from hvd_cluster.data.reading.shards import Remainder, ShardPlan


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a reader stands: what comes next. The same on all ranks that have taken as many steps."""

    #: Number of the epoch.
    epoch: int
    #: Rows of the epoch that all ranks together have taken.
    row: int = 0
    #: What the order of this epoch was made with, besides the seed; None for what the reader takes by itself.
    lanes: int | None = None
    window_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Makes the plan of one rank for any position: a pure function of these values."""

    #: The rows.
    split: Split
    #: This rank, and the number of ranks.
    rank: int
    size: int
    #: Rows per rank and step.
    batch_size: int
    #: Chooses the order together with the epoch.
    seed: int
    shuffle: bool
    #: What happens to the rows that do not fill the last global batch.
    remainder: Remainder
    #: Rows that are shuffled among each other at a time.
    window_rows: int

    def plan(self, position: Position) -> ShardPlan:
        """What the rank reads from a position to the end of its epoch."""
        return shards.plan(
            self.split if position.lanes is None else self.split.with_lanes(position.lanes),
            self.rank,
            self.size,
            self.batch_size,
            seed=self.seed,
            epoch=position.epoch,
            shuffle=self.shuffle,
            remainder=self.remainder,
            window_rows=position.window_rows or self.window_rows,
            begin=position.row,
        )

    def after(self, position: Position, plan: ShardPlan, steps: int) -> Position:
        """The position after so many steps (>= 1) of a plan that began at ``position``.

        After the last step of all ranks it is the beginning of the next epoch.
        """
        row = min(plan.position_at(steps), self.split.rows)
        if steps == plan.steps and (self.remainder != "uneven" or row == self.split.rows):
            return Position(epoch=position.epoch + 1)
        return Position(
            epoch=position.epoch,
            row=row,
            lanes=position.lanes or self.split.lanes,
            window_rows=position.window_rows or self.window_rows,
        )
