"""A rank's part in the agreement: votes in shared memory, reports between hosts.

:mod:`hvd_cluster.engine.negotiation` decides. :mod:`hvd_cluster.engine.shared_memory.ballot` holds the votes of one
host and its copy of the log. If the whole world is on one host, the last vote decides. Otherwise the last vote of a
host wakes its leader, which reports to the leaders of other hosts and passes on what they decide. All input comes
through arguments and all output goes to callbacks, so the tests run simulated ranks in any interleaving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hvd_cluster.engine.messages import Decision, Entry, Recall, ReportBatch, Tune, VotesComplete
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.shared_memory.ballot import MAX_VOTES, Ballot, Vote
from hvd_cluster.engine.signature import Key, SetId, Signature
from hvd_cluster.engine.tree import TreePosition


class Votable(Protocol):
    """What the agreement needs of a request."""

    @property
    def key(self) -> Key:
        """Matches it with the requests of other ranks."""

    @property
    def signature(self) -> Signature:
        """Must be equal on all ranks."""

    #: The epoch in which this rank has voted for it; -1 if it has not, or if the vote cannot be recalled any more.
    epoch: int


class Agreement:
    """One rank's part in the agreement on what to do next.

    Feed it with :meth:`submit`, :meth:`join`, :meth:`leave` and what arrives, then call :meth:`settle`.

    Args:
        negotiator: this rank's negotiator.
        ballot: the votes of this host; None if its ranks share no memory.
        position: this rank's position in the tree.
        quorum: returns how many ranks of this host belong to a process set.
        pending: returns the requests of this rank that are not decided.
        send_up: sends a message to the parent in the tree.
        send_down: sends log entries to the children that do not read them in the ballot.
        execute: executes a decision.
    """

    def __init__(
        self,
        negotiator: Negotiator,
        ballot: Ballot | None,
        *,
        position: TreePosition,
        quorum: Callable[[SetId], int],
        pending: Callable[[], Mapping[Key, Votable]],
        send_up: Callable[[ReportBatch], None],
        send_down: Callable[[tuple[Entry, ...]], None],
        execute: Callable[[Decision], None],
    ) -> None:
        self._negotiator = negotiator
        self._ballot = ballot
        self._is_root = position.parent is None
        self._is_leader = position.is_leader
        self._quorum = quorum
        self._pending = pending
        self._send_up = send_up
        self._send_down = send_down
        self._execute = execute
        # What waits for room in the log of the host.
        self._unsent_votes: list[Votable] = []
        self._unappended: deque[tuple[Entry, ...]] = deque()
        self._num_forgotten = 0
        self._pending_recall: tuple[set[int], bool] | None = None
        #: This rank joins when it has read the recall that begins this epoch; None if it does not join.
        self._joins_at: int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether :meth:`settle` waits for other ranks to read the host's full log."""
        return bool(self._unsent_votes or self._unappended or self._pending_recall)

    def submit(self, requests: Sequence[Votable]) -> None:
        """Announce requests by a vote if the log has an id for them, else by a report."""
        if self._ballot is None:
            for request in requests:
                self._negotiator.submit(request.key, request.signature)
        elif self._unsent_votes:
            self._unsent_votes += requests
        elif requests:
            self._vote(self._ballot, requests)

    def join(self) -> None:
        """This rank has run out of data; :meth:`submit` has had all its earlier requests."""
        if self._ballot is None:
            self._negotiator.join()
        else:
            # First report what this rank has voted for: the leader would take a report that follows the join for the
            # next request of that name.
            self._recall(self._ballot, set(), suspend=True)

    def leave(self, rank: int) -> None:
        """This rank shuts down in good order."""
        self._negotiator.leave(rank)

    def tune(self, tune: Tune) -> None:
        """At the root: have all ranks use other parameters from one log position on."""
        self._negotiator.tune(tune)

    def receive(self, child: int, message: ReportBatch) -> None:
        """A message from ``child`` has arrived."""
        if self._ballot is not None:
            # A rank of this host may have read further than this rank. Its report is then for the next request of a
            # name, and must not be added to the state of the previous one.
            self._read(self._ballot)
        self._negotiator.receive(child, message)

    def receive_log(self, entries: tuple[Entry, ...]) -> None:
        """A message of the world's log has arrived from the parent."""
        self._distribute(entries)

    def settle(self) -> None:
        """Report or decide what the subtree is ready for; execute decisions in log order."""
        ballot = self._ballot
        if ballot is None:
            if not self._is_root:
                self._report()
                return
            # An execution may free a name that waits to be negotiated.
            while entries := self._negotiator.take_log():
                self._distribute(entries)
        elif self._retry_blocked(ballot):
            self._read(ballot)
        elif self._is_leader:
            self._lead(ballot)
        else:
            self._report()
            if ballot.has_unread:
                self._read(ballot)
                self._report()

    # ---- the tree ---------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        message = self._negotiator.take_reports() if self._negotiator.has_output else None
        if message is not None:
            self._send_up(message)

    def _distribute(self, entries: tuple[Entry, ...]) -> None:
        """Pass one message of the world's log on, and apply it on this rank.

        It goes through the ring of this host first, which may be full: a child on another host that had read further
        than this rank would report ids that this rank does not know.
        """
        if self._ballot is None:
            self._send_down(entries)
            self._apply(entries)
        else:
            self._unappended.append(entries)

    def _apply(self, entries: tuple[Entry, ...]) -> None:
        """Apply one message of the world's log."""
        for decision in self._negotiator.apply(entries):
            self._execute(decision)
            if isinstance(decision, Tune) and self._ballot is not None:
                self._ballot.forget_plans()
        if self._ballot is not None and self._num_forgotten != self._negotiator.num_forgotten:
            self._num_forgotten = self._negotiator.num_forgotten
            self._submit_again(lambda request: self._negotiator.id_of(request.key, request.signature) is None)

    # ---- the ballot -------------------------------------------------------------------------------------------------

    def _retry_blocked(self, ballot: Ballot) -> bool:
        if self._pending_recall is not None:
            (ids, suspend), self._pending_recall = self._pending_recall, None
            self._recall(ballot, ids, suspend=suspend)
        if self._unsent_votes:
            requests, self._unsent_votes = self._unsent_votes, []
            self._vote(ballot, requests)
        return self._pending_recall is not None

    def _lead(self, ballot: Ballot) -> None:
        """As leader: report up or decide what was reported, unless a rank may have voted."""
        while True:
            self._read(ballot)
            if self._unappended:
                if not ballot.append(self._unappended[0]):
                    return
                self._send_down(self._unappended.popleft())
                continue
            if not self._negotiator.has_output:
                return
            contested = {id for id in self._negotiator.take_contested() if ballot.may_be_voted_for(id)}
            if contested:
                self._recall(ballot, contested, suspend=False)
                if self._pending_recall is not None:
                    return
                continue
            if not self._is_root:
                self._report()
                return
            entries = self._negotiator.take_log()
            if not entries:
                return
            self._distribute(entries)

    def _read(self, ballot: Ballot) -> None:
        # Executing what is read takes time, and more may be written meanwhile.
        while ballot.has_unread:
            for message in ballot.read():
                if isinstance(message, VotesComplete):
                    self._note_ready(message.ids)
                elif isinstance(message, Recall):
                    self._vote_again(message.epoch)
                else:
                    self._apply(message)

    def _note_ready(self, ids: tuple[int, ...]) -> None:
        """Count these as reported by all ranks of this host; recalls do not affect them."""
        pending = self._pending()
        for id in ids:
            request = pending.get(self._negotiator.key_of(id))
            if request is not None:
                request.epoch = -1
        if self._is_leader:
            self._negotiator.add_votes(ids)

    def _vote_again(self, epoch: int) -> None:
        self._submit_again(lambda request: request.epoch < epoch)
        if epoch == self._joins_at:
            self._joins_at = None
            self._negotiator.join()

    def _submit_again(self, is_void: Callable[[Votable], bool]) -> None:
        """Submit again the requests whose votes are void."""
        again = [request for request in self._pending().values() if request.epoch >= 0 and is_void(request)]
        for request in again:
            request.epoch = -1
        self.submit(again)

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
        for start in range(0, len(votes), MAX_VOTES):
            cast = ballot.cast(votes[start : start + MAX_VOTES])
            if cast is None:
                self._unsent_votes = voting[start:]
                return
            for request in voting[start : start + MAX_VOTES]:
                request.epoch = cast.epoch
            if cast.refused:
                refused = set(cast.refused)
                for vote, request in zip(votes[start:], voting[start : start + MAX_VOTES], strict=False):
                    if vote.id in refused:
                        request.epoch = -1
                        self._negotiator.submit(request.key, request.signature)

    def _recall(self, ballot: Ballot, ids: set[int], *, suspend: bool) -> None:
        if self._pending_recall is not None:
            held_ids, held_suspend = self._pending_recall
            ids, suspend = ids | held_ids, suspend or held_suspend
        epoch = ballot.recall(sorted(ids), suspend=suspend)
        self._pending_recall = (ids, suspend) if epoch is None else None
        if suspend:
            self._joins_at = epoch
