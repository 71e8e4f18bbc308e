"""A wait for ranks that keeps its core for a moment: shorter than sleep and wake."""

from __future__ import annotations

from hvd_cluster.engine.shared_memory.ballot import Ballot

#: How often a rank looks before it sleeps: about 50 us.
_MAX_LOOKS = 400


class Spinner:
    """Spins for a time that adapts to earlier waits.

    Args:
        ballot: where other ranks write; None if spinning is not worth it.
    """

    def __init__(self, ballot: Ballot | None) -> None:
        self._ballot = ballot
        self._typical_looks = 0

    def spin(self) -> bool:
        """Look briefly until another rank has written to the ballot; True if one has."""
        ballot = self._ballot
        if ballot is None:
            return False
        limit = min(_MAX_LOOKS, 2 * self._typical_looks + 40)
        looks = 0
        while looks < limit and not ballot.has_unread:
            looks += 1
        self._typical_looks += (looks - self._typical_looks) // 8
        return ballot.has_unread
