"""One rank's side of agreeing on what to do next: votes where the ranks share memory, reports up the tree elsewhere.

:mod:`hvd_cluster.engine.negotiation` decides, :mod:`hvd_cluster.engine.shared_memory.ballot` holds votes and log where
the whole world is on one host; here they meet. Everything comes in through arguments and goes out through the three
callbacks, so the tests run it on simulated ranks, in any interleaving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hvd_cluster.engine.messages import Close, Decision, Entry, Recall, Tune, Up
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.request import Key, Signature
from hvd_cluster.engine.shared_memory.ballot import MOST_VOTES, Ballot, Vote


class Votable(Protocol):
    """A request, as far as agreement is concerned."""

    @property
    def key(self) -> Key:
        """What it is matched by."""

    @property
    def signature(self) -> Signature:
        """What must be equal on all ranks."""

    #: The epoch in which this rank has voted for it, or -1.
    epoch: int


class Agreement:
    """Submit, join and leave; hear what comes from the children; settle.

    Args:
        negotiator: this rank's negotiator.
        ballot: what the ranks share if they are all on one host.
        is_root: this rank sequences.
        quorum: how many ranks a process set has.
        pending: the requests of this rank that are not decided.
        send_up: hands a message to the parent in the tree.
        send_down: hands a message of the log to the children.
    """

    def __init__(
        self,
        negotiator: Negotiator,
        ballot: Ballot | None,
        *,
        is_root: bool,
        quorum: Callable[[int], int],
        pending: Callable[[], Iterable[Votable]],
        send_up: Callable[[Up], None],
        send_down: Callable[[tuple[Entry, ...], bool], None],
    ) -> None:
        self._negotiator = negotiator
        self._ballot = ballot
        self._is_root = is_root
        self._quorum = quorum
        self._pending = pending
        self._send_up = send_up
        self._send_down = send_down
        # What the log of the host had no room for.
        self._uncast: list[Votable] = []
        self._unappended: tuple[Entry, ...] = ()
        self._unrecalled: tuple[set[int], bool] | None = None
        #: This rank joins when it has read the recall that begins this epoch; None where it does not join.
        self._joins_at: int | None = None

    @property
    def is_held_up(self) -> bool:
        """The log of the host is full: once the other ranks have read it, :meth:`settle` goes on."""
        return bool(self._uncast or self._unappended or self._unrecalled)

    def submit(self, requests: Sequence[Votable]) -> None:
        """Tell the other ranks of requests: by a vote where the log has an id for one, else by a report."""
        if self._ballot is None:
            for request in requests:
                self._negotiator.submit(request.key, request.signature)
        elif self._uncast:
            self._uncast += requests
        elif requests:
            self._vote(self._ballot, requests)

    def join(self) -> None:
        """This rank has run out of data; what it has submitted before was submitted here before."""
        if self._ballot is None:
            self._negotiator.join()
        else:
            # What this rank has voted for has to be reported before: the root would take a report that comes after its
            # word that it has joined for the next request of that name.
            self._recall(self._ballot, set(), suspend=True)

    def leave(self, rank: int) -> None:
        """This rank shuts down in good order."""
        self._negotiator.leave(rank)

    def tune(self, tune: Tune) -> None:
        """At the root: let all ranks use other parameters, from one place of the log on."""
        self._negotiator.tune(tune)

    def hear(self, child: int, message: Up) -> None:
        """A message from ``child`` has arrived."""
        self._negotiator.hear(child, message)

    def settle(self, carry_out: Callable[[Decision], None]) -> None:
        """Send up what is ready below, or decide on it; then carry out what was decided, in the order of the log."""
        negotiator, ballot = self._negotiator, self._ballot
        if ballot is not None and self._is_held_up_by_others(ballot):
            self._read(ballot, carry_out)
            return
        if not self._is_root:
            self._report()
            if ballot is not None and ballot.has_news:
                self._read(ballot, carry_out)
                self._report()
        elif ballot is None:
            # Carrying out may free a name that was waiting to be negotiated.
            while entries := negotiator.take_log():
                self.apply(entries, carry_out)
        else:
            self._decide(ballot, carry_out)

    def _report(self) -> None:
        message = self._negotiator.take_up() if self._negotiator.has_news else None
        if message is not None:
            self._send_up(message)

    def apply(self, entries: tuple[Entry, ...], carry_out: Callable[[Decision], None]) -> None:
        """One message of the log has come from the parent, or was written here: forward it, then do what it says."""
        if self._ballot is None:
            self._send_down(entries, any(isinstance(entry, Close) for entry in entries))
        for decision in self._negotiator.apply(entries):
            if isinstance(decision, Recall):
                self._vote_anew(decision.epoch)
                if decision.epoch == self._joins_at:
                    self._joins_at = None
                    self._negotiator.join()
                continue
            carry_out(decision)
            if isinstance(decision, Tune) and self._ballot is not None:
                self._ballot.forget_plans()

    def _is_held_up_by_others(self, ballot: Ballot) -> bool:
        if self._unrecalled is not None:
            (ids, suspend), self._unrecalled = self._unrecalled, None
            self._recall(ballot, ids, suspend=suspend)
        if self._uncast:
            requests, self._uncast = self._uncast, []
            self._vote(ballot, requests)
        return self._unrecalled is not None

    def _decide(self, ballot: Ballot, carry_out: Callable[[Decision], None]) -> None:
        """The root's part: what was reported goes into the log, unless some rank may have voted for it."""
        while True:
            self._read(ballot, carry_out)
            if not self._unappended:
                if not self._negotiator.has_news:
                    return
                contested = {id for id in self._negotiator.take_contested() if ballot.may_be_voted_for(id)}
                if contested:
                    self._recall(ballot, contested, suspend=False)
                    if self._unrecalled is not None:
                        return
                    continue
                self._unappended = self._negotiator.take_log()
                if not self._unappended:
                    return
            if not ballot.append(self._unappended):
                return
            self._unappended = ()

    def _read(self, ballot: Ballot, carry_out: Callable[[Decision], None]) -> None:
        # Carrying out what is read takes time, in which more may be written.
        while ballot.has_news:
            for entries in ballot.read():
                self.apply(entries, carry_out)

    def _vote(self, ballot: Ballot, requests: Sequence[Votable]) -> None:
        votes: list[Vote] = []
        voting: list[Votable] = []
        for request in requests:
            id = self._negotiator.id_of(request.key, request.signature)
            if id is None:
                self._negotiator.submit(request.key, request.signature)
            else:
                votes.append(Vote(id, self._quorum(request.key[0])))
                voting.append(request)
        for start in range(0, len(votes), MOST_VOTES):
            cast = ballot.cast(votes[start : start + MOST_VOTES])
            if cast is None:
                self._uncast = voting[start:]
                return
            for request in voting[start : start + MOST_VOTES]:
                request.epoch = cast.epoch
            if cast.refused:
                refused = set(cast.refused)
                for vote, request in zip(votes[start:], voting[start : start + MOST_VOTES], strict=False):
                    if vote.id in refused:
                        request.epoch = -1
                        self._negotiator.submit(request.key, request.signature)

    def _vote_anew(self, epoch: int) -> None:
        again = [request for request in self._pending() if 0 <= request.epoch < epoch]
        for request in again:
            request.epoch = -1
        self.submit(again)

    def _recall(self, ballot: Ballot, ids: set[int], *, suspend: bool) -> None:
        if self._unrecalled is not None:
            held_ids, held_suspend = self._unrecalled
            ids, suspend = ids | held_ids, suspend or held_suspend
        epoch = ballot.recall(sorted(ids), suspend=suspend)
        self._unrecalled = (ids, suspend) if epoch is None else None
        if suspend:
            self._joins_at = epoch
