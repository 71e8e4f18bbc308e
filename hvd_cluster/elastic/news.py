"""Rank 0's notification on all ranks, at little cost: every commit checks it."""

from __future__ import annotations

import torch

from hvd_cluster.engine.process_sets import global_process_set
from hvd_cluster.engine.request import Kind
from hvd_cluster.engine.submission import Collective


def agreed_news(news: tuple[float, float, int]) -> tuple[float, float, int]:
    """Rank 0's ``news`` on every rank, by one small tensor instead of a pickled object.

    Raises:
        HorovodInternalError: the world has ended.
    """
    collective = Collective(kind=Kind.BROADCAST, process_set=global_process_set, name="elastic.news", root=0)
    (agreed,) = collective.begin([torch.tensor(news, dtype=torch.float64, device="cpu")]).wait()
    before, latest, change = agreed.tolist()
    return before, latest, int(change)
