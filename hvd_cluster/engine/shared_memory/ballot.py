"""Agreement in shared memory among a host's ranks: a request's last vote decides.

The segment holds a table with a count for each request that the log has given an id (see
:mod:`hvd_cluster.engine.negotiation`), and the log itself, a ring of bytes that every rank reads at its own pace.
One lock protects everything. A rank votes for the ids that it has submitted. If the whole world is on this host, the
vote that completes a count also appends the decision to the log, so no other process has to run for it. Otherwise it
appends that the host is ready, and wakes the leader, which reports it to other hosts. Requests without an id, or whose
signature has changed, travel as reports up the tree to the leader. The leader appends the world's log, whether decided
here or on another host, to the same ring: one log orders everything.

Votes and reports must not be mixed for one request, or neither would ever be complete. The leader (if a rank of its
host reports a request that has an id) or a rank that joins then appends a *recall*: it sets all incomplete counts to
zero and begins a new epoch. Every rank votes again for what it voted for in an older epoch; it reports the request if
nothing can be voted for with that id any more, or if voting is suspended because a rank has joined. A recalled id can
be voted for again once the log has run it, because then no rank has it pending.

Memory order: the lock is a semaphore, whose operations acquire and release. What is read without it
(:attr:`Ballot.has_unread`) is only a hint to look again under it, so this is correct on weakly ordered processors.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from hvd_cluster.engine.messages import Close, Define, Entry, Forget, HostMessage, JoinDone, Run
from hvd_cluster.engine.shared_memory.deadline import Check, Deadline
from hvd_cluster.engine.shared_memory.log_encoding import (
    PICKLED,
    PIECE,
    READY,
    RECALL,
    RUN,
    LogDecoder,
    RunEncoder,
    framed,
    packed,
)
from hvd_cluster.engine.shared_memory.semaphores import STRIDE_BYTES, Semaphores

#: Ids that differ by a multiple of this share a slot of the table; a request whose slot is taken is reported instead.
_NUM_SLOTS = 1 << 13
_RING_BYTES = 1 << 20
#: Longer messages of the leader are split.
_MAX_BYTES = _RING_BYTES // 8
#: This many votes fit into the log at once.
MAX_VOTES = _MAX_BYTES // 16
#: How often a rank tries the lock before it blocks: it is held for a few microseconds.
_LOCK_TRIES = 400

# Words of the header, then two words for each rank.
_TAIL, _IS_SUSPENDED, _IS_CLOSED, _EPOCH, _HOLDER, _NUM_OPEN, _AWAITED_UNTIL_NS, _NUM_WORDS = range(8)


class Vote(NamedTuple):
    """This rank has submitted a request."""

    id: int
    #: Votes that complete it.
    quorum: int


class Cast(NamedTuple):
    """The result of votes."""

    #: The epoch in which they were counted.
    epoch: int
    #: These ids cannot be voted for: report the requests.
    refused: list[int]


class Ballot:
    """One rank's view of the table and the log.

    Args:
        memory: :meth:`num_bytes` zero bytes that all ranks share, from ``offset`` on.
        offset: a multiple of 64.
        ranks: the global ranks of the host, by index.
        index: this rank's index; the rank with index 0 creates the lock and leads.
        wakeups: an eventfd for each rank, by index.
        plan: returns the buckets for ids whose counts are complete; None if other hosts must agree too.
        check: called now and then while waiting for the lock; raises if the world is broken.
        timeout_s: how long to wait for the lock. It is held for microseconds, unless a rank is stopped meanwhile.
        spins: a rank tries for the lock before it blocks; False if ranks outnumber cores.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        *,
        ranks: Sequence[int],
        index: int,
        wakeups: Sequence[int],
        plan: Callable[[tuple[int, ...]], tuple[Run, ...]] | None,
        check: Check,
        timeout_s: float,
        spins: bool,
    ) -> None:
        num_ranks = len(wakeups)
        self._index = index
        self._wakeups = wakeups
        self._encoder = None if plan is None else RunEncoder(plan)
        self._decoder = LogDecoder()
        self._lock = Semaphores(memory, offset, 1, create=index == 0, max_tries=_LOCK_TRIES if spins else 0)
        if index == 0:
            self._lock.post(0)
        num_words = _NUM_WORDS + 2 * (num_ranks + _NUM_SLOTS)
        start = offset + STRIDE_BYTES
        whole = memoryview(memory)
        words = whole[start : start + 8 * num_words].cast("q")
        self._wholes = (words, whole)
        self._header = header = words[:_NUM_WORDS]

        def holders() -> list[int]:
            holder = header[_HOLDER]
            return [ranks[holder - 1]] if holder else []

        self._deadline = Deadline(check, timeout_s, holders, "finish its vote")
        #: For each rank: how far it has read, and whether it sleeps.
        self._positions, self._sleeps = (words[_NUM_WORDS + i : -2 * _NUM_SLOTS : 2] for i in range(2))
        #: For each slot: the id plus one, or 0 if the slot is free, and the count.
        self._ids, self._counts = (words[i - 2 * _NUM_SLOTS :: 2] for i in range(2))
        self._ring = whole[start + 8 * num_words : start + 8 * num_words + _RING_BYTES]
        self._zeros = memoryview(bytes(8 * _NUM_SLOTS)).cast("q")
        self._position = 0
        self._outgoing: list[bytes] = []

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """The memory that a ballot of ``num_ranks`` needs."""
        return STRIDE_BYTES + 8 * (_NUM_WORDS + 2 * (num_ranks + _NUM_SLOTS)) + _RING_BYTES

    # ---- writing ----------------------------------------------------------------------------------------------------

    def cast(self, votes: Sequence[Vote]) -> Cast | None:
        """Count this rank's votes, and append the decision for complete counts.

        Returns None if the log is full. Every rank must read a full log: read it, and call again.

        Args:
            votes: at most :data:`MAX_VOTES`.
        """
        sleepers: list[int] = []
        self._acquire_lock()
        try:
            # A rank that votes is awake, and reads before it sleeps.
            self._sleeps[self._index] = 0
            epoch = self._header[_EPOCH]
            # Even if there is no room: a rank that joins first reports what it has submitted.
            if self._header[_IS_SUSPENDED]:
                return Cast(epoch, [vote.id for vote in votes])
            if not self._has_room(16 * len(votes) + 16):
                sleepers = self._take_sleepers()
                return None
            ids, counts = self._ids, self._counts
            refused, complete = [], []
            num_open = self._header[_NUM_OPEN]
            for id, quorum in votes:
                slot = id % _NUM_SLOTS
                if ids[slot] != id + 1:
                    refused.append(id)
                    continue
                count = counts[slot] + 1
                if count == quorum:
                    complete.append(id)
                    count = 0
                num_open += (count > 0) - (counts[slot] > 0)
                counts[slot] = count
            self._header[_NUM_OPEN] = num_open
            if complete:
                if self._encoder is None:
                    self._write(READY, packed(complete))
                    sleepers = self._take_sleepers([0])
                else:
                    self._write(RUN, self._encoder.encode(tuple(complete)))
                    sleepers = self._take_sleepers()
            return Cast(epoch, refused)
        finally:
            self._release_lock()
            self._wake(sleepers)

    def append(self, entries: tuple[Entry, ...]) -> bool:
        """Append a message of the world's log; False if the ring is full.

        If it is full, read it, and call again with the same message. Votes for ids that it forgets are void; the ranks
        that have voted read that here.
        """
        sleepers: list[int] = []
        self._acquire_lock()
        try:
            if not self._outgoing:
                for entry in entries:
                    if isinstance(entry, Forget):
                        self._close_vote(entry.id)
                message = pickle.dumps(entries, protocol=5)
                starts = range(0, len(message), _MAX_BYTES)
                self._outgoing = [message[start : start + _MAX_BYTES] for start in starts]
            while self._outgoing and self._has_room(len(self._outgoing[0])):
                self._write(PIECE if len(self._outgoing) > 1 else PICKLED, self._outgoing.pop(0))
            sleepers = self._take_sleepers()  # to read what was written, or to make room for the rest
            if self._outgoing:
                return False
            for entry in entries:
                if isinstance(entry, Define):
                    self._open_vote(entry.id)
                elif isinstance(entry, Run):
                    for id in entry.ids:
                        self._open_vote(id)
                elif isinstance(entry, Forget):
                    self._close_vote(entry.id)
                elif isinstance(entry, JoinDone):
                    self._header[_IS_SUSPENDED] = 0
                elif isinstance(entry, Close):
                    self._header[_IS_CLOSED] = 1
            return True
        finally:
            self._release_lock()
            self._wake(sleepers)

    def recall(self, ids: Iterable[int], *, suspend: bool = False) -> int | None:
        """Have all ranks vote again, but not for ``ids``.

        Returns the new epoch, or None if the log is full. If no rank has voted for any of ``ids``, the votes stay valid
        and the epoch does not change.

        Args:
            ids: some ranks have voted for these and others have reported them; from here on all ranks report them.
            suspend: no rank votes from here on until all ranks have joined.
        """
        ids = list(ids)
        sleepers: list[int] = []
        self._acquire_lock()
        try:
            if not suspend and not any(map(self._count, ids)):
                for id in ids:
                    self._close_vote(id)
                return self._header[_EPOCH]
            sleepers = self._take_sleepers()
            if not self._has_room(16):
                return None
            for id in ids:
                self._close_vote(id)
            self._counts[:] = self._zeros
            self._header[_NUM_OPEN] = 0
            self._header[_EPOCH] += 1
            if suspend:
                self._header[_IS_SUSPENDED] = 1
            self._write(RECALL, packed([self._header[_EPOCH]]))
            return self._header[_EPOCH]
        finally:
            self._release_lock()
            self._wake(sleepers)

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def has_unread(self) -> bool:
        """There is something to read; a hint, because it is read without the lock."""
        return self._header[_TAIL] != self._position

    @property
    def is_closed(self) -> bool:
        """The log contains the orderly end of the world, read or not."""
        return bool(self._header[_IS_CLOSED])

    @property
    def num_open(self) -> int:
        """For how many requests some ranks have voted, and not all; a hint."""
        return self._header[_NUM_OPEN]

    def note_awaited(self, for_s: float) -> None:
        """Other hosts wait for this one; this is true for ``for_s`` seconds."""
        self._header[_AWAITED_UNTIL_NS] = time.monotonic_ns() + int(for_s * 1e9)

    @property
    def is_awaited(self) -> bool:
        """Other hosts wait for this one; a hint."""
        return self._header[_AWAITED_UNTIL_NS] > time.monotonic_ns()

    def may_be_voted_for(self, id: int) -> bool:
        """Some rank may have voted for ``id``, or may still do so."""
        self._acquire_lock()
        try:
            return not self._header[_IS_SUSPENDED] and self._ids[id % _NUM_SLOTS] == id + 1
        finally:
            self._release_lock()

    def read(self) -> list[HostMessage]:
        """The messages of the log that this rank has not read yet."""
        if self._header[_TAIL] == self._position:
            return []
        self._acquire_lock()
        try:
            tail = self._header[_TAIL]
            start, end = self._position % _RING_BYTES, tail % _RING_BYTES
            data = bytes(self._ring[start:end]) if start < end else bytes(self._ring[start:]) + bytes(self._ring[:end])
            self._position = tail
            self._positions[self._index] = tail
            self._sleeps[self._index] = 0
        finally:
            self._release_lock()
        return list(self._decoder.decode(data))

    def may_sleep(self) -> bool:
        """False if there is something to read; True guarantees a wake-up when there is."""
        if self._header[_TAIL] != self._position:
            return False
        self._acquire_lock()
        try:
            if self._header[_TAIL] != self._position:
                return False
            self._sleeps[self._index] = 1
            return True
        finally:
            self._release_lock()

    def release(self) -> None:
        """Release the memory; no method may be called afterwards."""
        for view in (self._header, self._positions, self._sleeps, self._ids, self._counts, self._ring, *self._wholes):
            view.release()
        self._lock.release()

    def forget_plans(self) -> None:
        """The buckets for requests that are ready together may have changed."""
        if self._encoder is not None:
            self._encoder.forget()

    # ---- the lock ---------------------------------------------------------------------------------------------------

    def _acquire_lock(self) -> None:
        self._lock.wait(0, self._deadline)
        self._header[_HOLDER] = self._index + 1

    def _release_lock(self) -> None:
        self._header[_HOLDER] = 0
        self._lock.post(0)

    # ---- inside, under the lock -------------------------------------------------------------------------------------

    def _take_sleepers(self, among: Iterable[int] | None = None) -> list[int]:
        sleepers = []
        for index in range(len(self._wakeups)) if among is None else among:
            if self._sleeps[index] and index != self._index:
                self._sleeps[index] = 0
                sleepers.append(index)
        return sleepers

    def _wake(self, ranks: list[int]) -> None:
        for index in ranks:
            with suppress(BlockingIOError):  # it is readable already
                os.eventfd_write(self._wakeups[index], 1)

    def _has_room(self, num_bytes: int) -> bool:
        return self._header[_TAIL] + num_bytes + 16 - min(self._positions) <= _RING_BYTES

    def _write(self, kind: int, payload: bytes) -> None:
        data = framed(kind, payload)
        start = self._header[_TAIL] % _RING_BYTES
        first = data[: _RING_BYTES - start]
        self._ring[start : start + len(first)] = first
        if len(first) < len(data):
            self._ring[: len(data) - len(first)] = data[len(first) :]
        self._header[_TAIL] += len(data)

    def _open_vote(self, id: int) -> None:
        slot = id % _NUM_SLOTS
        if self._ids[slot] == 0:
            self._ids[slot], self._counts[slot] = id + 1, 0

    def _close_vote(self, id: int) -> None:
        slot = id % _NUM_SLOTS
        if self._ids[slot] == id + 1:
            self._header[_NUM_OPEN] -= self._counts[slot] > 0
            self._ids[slot] = self._counts[slot] = 0

    def _count(self, id: int) -> int:
        slot = id % _NUM_SLOTS
        return self._counts[slot] if self._ids[slot] == id + 1 else 0
