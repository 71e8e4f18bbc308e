"""Warnings for a worker that reads other workers' data, or gets no batch."""

from __future__ import annotations

import logging

from hvd_cluster.topology import Topology


def warn_if_not_own_shard(logger: logging.Logger, shard: int | None, count: int | None, arguments: str) -> None:
    """Warn where one of several workers reads another shard than its own.

    Args:
        logger: of the module that reads.
        shard, count: which shard of how many it is about to read; None where the caller said nothing.
        arguments: what to pass instead, as the user would write it.
    """
    try:
        topology = Topology.from_env()
    except ValueError:  # half a launcher's variables: init() will say so, and reading needs none of them
        return
    if topology.size > 1 and (shard, count) != (topology.rank, topology.size):
        logger.warning(
            "this is rank %d of %d, but it reads shard %s of %s: pass %s",
            topology.rank,
            topology.size,
            shard,
            count,
            arguments,
        )


def warn_if_no_batch(logger: logging.Logger, rows: int, batch_size: int, size: int, steps: int) -> None:
    """Warn where the rows do not fill one global batch.

    A loop over the reader then does nothing.
    """
    if rows and not steps:
        logger.warning(
            "%d rows do not fill one global batch of %d (batch_size %d, on %d ranks), so remainder='drop' leaves no "
            "batch: pass remainder='pad' or 'partial', or a smaller batch_size",
            rows,
            batch_size * size,
            batch_size,
            size,
        )
