"""Which gradients each rank has, if steps compute those of some variables only.

Another rank may have those of other variables. A request says which gradients it holds, so that no rank's is added to
that of another variable: if the ranks have different ones, it fails on all of them. What is not compiled then asks the
other ranks, and takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from hvd_cluster.engine import objects
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.submission import Present
from hvd_cluster.errors import RanksDisagreeError


@dataclass(frozen=True)
class Presence:
    """A gradient that some rank has."""

    is_sparse: bool
    #: The name of its element type.
    dtype: str
    #: That of its indices, if it is sparse.
    index_dtype: str = ""


def dense_ones(presences: Sequence[Presence | None], num_bytes: Sequence[int]) -> Present:
    """The dense gradients of this rank; the fingerprint includes sparse ones too.

    Args:
        presences: for each variable, what this rank has; None for nothing.
        num_bytes: of each variable.
    """
    text = "".join("-" if each is None else "s" if each.is_sparse else "d" for each in presences)
    indices = [index for index, each in enumerate(presences) if each is not None and not each.is_sparse]
    return Present(tuple(num_bytes), tuple(indices), crc32(text.encode()))


def agree(presences: Sequence[Presence | None], process_set: ProcessSet) -> list[Presence | None] | None:
    """For each variable, what all will have; None if equal already. Collective.

    A gradient that is dense on one rank will be so on all.

    Raises:
        RanksDisagreeError: the ranks have gradients of different numbers of variables.
    """
    by_rank = objects.allgather_object(list(presences), None, process_set)
    if all(theirs == by_rank[0] for theirs in by_rank):
        return None
    if len({len(theirs) for theirs in by_rank}) > 1:
        raise RanksDisagreeError(
            f"the ranks reduce the gradients of {', '.join(str(len(theirs)) for theirs in by_rank)} variables, in the "
            "order of the ranks: pass the same variables on all of them"
        )
    return [_joined([each for each in given if each is not None]) for given in zip(*by_rank, strict=True)]


def _joined(given: Sequence[Presence]) -> Presence | None:
    dense = [each for each in given if not each.is_sparse]
    return next(iter([*dense, *given]), None)
