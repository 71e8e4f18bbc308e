"""Pure agreement on what to do next: events in, messages and decisions out.

Ranks match requests by name, not by call order. A request that is ready stays ready, so readiness is AND-ed
incrementally up the tree of :mod:`hvd_cluster.engine.tree`: a node reports a request to its parent once, when its own
rank and every subtree below it have submitted it. The root decides: it writes one log, which travels down the tree and
which every rank applies in the same order. All process sets share one log, so overlapping sets cannot deadlock: with an
order for each set, three ranks in three sets of two could each start with another set and wait forever.

Requests that were seen before travel as a short id. The ids come from the log itself (:class:`Define`), so every rank
knows them at the same position. A forgotten id (:class:`Forget`) stays readable until every child is known to have
applied that position of the log: a report sent earlier may still contain it.

``tests/engine/test_protocol_model.py`` explores the protocol's states. Its ancestors are Horovod's coordinator
(arXiv:1802.05799, section 3) and its response cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hvd_cluster.engine.disagreement import explain, not_with_join
from hvd_cluster.engine.fusion import plan_buckets
from hvd_cluster.engine.messages import (
    Bucket,
    CachedReport,
    Close,
    Decision,
    Define,
    Entry,
    Forget,
    JoinDone,
    Joined,
    Leaving,
    RankSignature,
    Refuse,
    Report,
    ReportBatch,
    Run,
    Tune,
)
from hvd_cluster.engine.request_ids import RequestIds
from hvd_cluster.engine.request_state import RequestState
from hvd_cluster.engine.signature import Key, SetId, Signature
from hvd_cluster.engine.tree import TreePosition

#: After this many log messages a node without reports still informs its parent how far it has read.
_ACKNOWLEDGE_EVERY = 512


class Negotiator:
    """The state of one rank.

    Feed it events (:meth:`submit` to :meth:`apply`), then send what :meth:`take_reports` and :meth:`take_log` return.

    Args:
        position: this rank's position in the tree.
        process_sets: the ranks of each process set; the global set has id 0.
        cache_capacity: number of requests that keep an id; 0 gives every request a new one.
        groups_apart: a grouped request does not share its bucket with others.
        fusion_threshold: returns the size of a bucket in bytes; called at each decision, since autotune may change it.
    """

    def __init__(
        self,
        position: TreePosition,
        process_sets: Mapping[int, frozenset[int]],
        cache_capacity: int,
        fusion_threshold: Callable[[], int],
        groups_apart: bool = False,
    ) -> None:
        self._position = position
        self._process_sets = dict[SetId, frozenset[int]](process_sets.items())
        self._cache_capacity = cache_capacity
        self._fusion_threshold = fusion_threshold
        self._groups_apart = groups_apart
        self._states: dict[Key, RequestState] = {}
        self._touched: dict[Key, None] = {}  # an ordered set
        self._ids = RequestIds()
        self._num_applied = 0
        self._num_acknowledged = 0
        self._children_applied = dict.fromkeys(position.children, 0)
        self._joined = False
        self._joined_below: set[int] = set()
        self._unsent_joins: list[int] = []
        self._last_joined = -1
        self._reports: list[Report | CachedReport | Joined | Leaving] = []
        self._leaving: int | None = None
        self._is_closed = False
        self._removed_sets: set[SetId] = set()
        self._contested: set[int] = set()
        self._num_below = sum(map(len, position.children.values()))
        #: By process set: the children whose subtrees have members of it, with these members.
        self._below_of_set: dict[SetId, dict[int, frozenset[int]]] = {}
        self._tune: Tune | None = None

    # ---- events -----------------------------------------------------------------------------------------------------

    def submit(self, key: Key, signature: Signature) -> None:
        """This rank has submitted a request whose key is not pending."""
        self._contest(key)
        state = self._state_of(key)
        state.mine = True
        state.add(RankSignature(self._position.rank, signature))

    def join(self) -> None:
        """This rank has run out of data and sends zeros until all have."""
        self._joined = True
        self._note_join(self._position.rank)

    def leave(self, rank: int) -> None:
        """A rank of this subtree shuts down in good order."""
        if self._position.parent is None:
            self._leaving = rank if self._leaving is None else self._leaving
        else:
            self._reports.append(Leaving(rank))

    def tune(self, tune: Tune) -> None:
        """At the root: have all ranks use other parameters."""
        self._tune = tune

    def receive(self, child: int, message: ReportBatch) -> None:
        """A message from ``child`` has arrived."""
        self._children_applied[child] = message.num_applied
        for item in message.items:
            if isinstance(item, CachedReport):
                key, signature = self._ids.read(item.id)
                self._add_report(child, key, (RankSignature(item.rank, signature),), item.joined)
            elif isinstance(item, Report):
                self._add_report(child, item.key, item.signatures, item.joined)
            elif isinstance(item, Joined):
                self._joined_below.add(item.rank)
                self._note_join(item.rank)
            else:
                self.leave(item.rank)
        self._drop_readable()

    def apply(self, entries: tuple[Entry, ...]) -> list[Decision]:
        """Apply a log message already sent to the children; returns ordered decisions.

        A rank that had not read the :class:`Close` yet may have appended entries by its vote. All ranks ignore them,
        because ranks that have read the end may be gone.
        """
        self._num_applied += 1
        decisions: list[Decision] = []
        for entry in entries:
            if self._is_closed:
                break
            if isinstance(entry, Define):
                self._ids.define(entry)
            elif isinstance(entry, Forget):
                self._forget(entry.id)
            elif isinstance(entry, Run):
                decisions.append(self._run(entry))
            else:
                if isinstance(entry, Refuse):
                    self._states.pop(entry.key, None)
                    self._touched.pop(entry.key, None)
                elif isinstance(entry, JoinDone):
                    self._joined = False
                    self._joined_below.clear()
                    self._unsent_joins.clear()
                elif isinstance(entry, Close):
                    self._is_closed = True
                decisions.append(entry)
        self._drop_readable()
        return decisions

    def add_process_set(self, id: int, ranks: frozenset[int]) -> None:
        """A process set exists from this position of the log on."""
        self._process_sets[id] = ranks

    def remove_process_set(self, id: int) -> None:
        """Drop the request states of a removed process set; the cache drops definitions."""
        for key in [key for key in self._states if key[0] == id]:
            del self._states[key]
            self._touched.pop(key, None)
        self._removed_sets.add(id)

    # ---- output -----------------------------------------------------------------------------------------------------

    @property
    def num_forgotten(self) -> int:
        """How many ids the log has forgotten so far."""
        return self._ids.num_forgotten

    @property
    def has_output(self) -> bool:
        """:meth:`take_reports` or :meth:`take_log` may return something."""
        return bool(
            self._touched
            or self._unsent_joins
            or self._reports
            or self._leaving is not None
            or self._tune is not None
            or (self._position.parent is not None and self._must_acknowledge)
        )

    @property
    def _must_acknowledge(self) -> bool:
        return self._num_applied - self._num_acknowledged >= _ACKNOWLEDGE_EVERY

    def take_reports(self) -> ReportBatch | None:
        """The message for the parent; None if nothing is to be reported. Not at the root."""
        for key in self._take_ready():
            self._reports.append(self._report(key))
        # After the reports: a join stands in for what the rank has not submitted before.
        self._reports += [Joined(rank) for rank in self._unsent_joins]
        self._unsent_joins.clear()
        if not self._reports and not self._must_acknowledge:
            return None
        message = ReportBatch(self._num_applied, tuple(self._reports))
        self._num_acknowledged = self._num_applied
        self._reports.clear()
        return message

    def take_log(self) -> tuple[Entry, ...]:
        """At the root: the next log message, to send down and apply here, or empty."""
        entries: list[Entry] = []
        ready: list[tuple[int, Key, Signature]] = []
        transient: list[int] = []
        used: set[int] = set()
        # Only this method assigns ids, and they are applied before it is called again.
        num_cached = len(self._ids)
        for key in self._take_ready():
            state = self._states[key]
            refusal = self._refusal(key, state)
            if refusal is not None:
                entries.append(refusal)
                continue
            signature = state.signatures[0].signature
            id = self._ids.get(key)
            if id is not None and self._ids[id][1] != signature:
                entries.append(Forget(id))
                num_cached -= 1
                id = None
            if id is None:
                id = self._ids.next_id
                self._ids.next_id += 1
                entries.append(Define(id, key, signature))
                num_cached += 1
                if self._cache_capacity == 0:
                    transient.append(id)
            used.add(id)
            ready.append((id, key, signature))
        wanted = [(key[0], signature) for _, key, signature in ready]
        buckets = plan_buckets(wanted, self._fusion_threshold(), groups_apart=self._groups_apart)
        entries += [Run(tuple(ready[index][0] for index in bucket)) for bucket in buckets]
        entries += [Forget(id) for id in transient]
        if self._cache_capacity:
            idle = (id for id in self._ids if id not in used and self._ids[id][0] not in self._states)
            entries += [Forget(id) for id, _ in zip(idle, range(num_cached - self._cache_capacity), strict=False)]
        if self._tune is not None:
            entries.append(self._tune)
            self._tune = None
        if self._joined and len(self._joined_below) == self._num_below:
            entries.append(JoinDone(self._last_joined))
        if self._leaving is not None:
            entries.append(Close(self._leaving))
            self._leaving = None
        return tuple(entries)

    def missing(self) -> set[int]:
        """This rank and the children that have not reported what others have reported."""
        found: set[int] = set()
        for key, state in self._states.items():
            if not (state.mine or self._joined) and self._position.rank in self._members(key[0]):
                found.add(self._position.rank)
            below = self._members_below(key)
            found |= {child for child in below.keys() - state.children if not below[child] <= self._joined_below}
        return found

    # ---- for ranks that vote through shared memory ------------------------------------------------------------------

    def add_votes(self, ids: Iterable[int]) -> None:
        """As leader: add what all ranks of the host have submitted as the log defines it."""
        for id in ids:
            key, signature = self._ids[id]
            if key[0] in self._removed_sets:
                continue
            members = [rank for rank in self._position.host_ranks if rank in self._members(key[0])]
            state = self._state_of(key)
            state.mine = self._position.rank in members
            state.children.update(rank for rank in members if rank != self._position.rank)
            state.add(RankSignature(members[0], signature))

    def key_of(self, id: int) -> Key:
        """The key that the log has defined ``id`` for."""
        return self._ids[id][0]

    def id_of(self, key: Key, signature: Signature) -> int | None:
        """The id that the log has given to this request, if its signature is unchanged."""
        return self._ids.find(key, signature)

    def plan(self, ids: tuple[int, ...]) -> tuple[Run, ...]:
        """The buckets for requests that are ready, by id."""
        wanted = [(self._ids[id][0][0], self._ids[id][1]) for id in ids]
        buckets = plan_buckets(wanted, self._fusion_threshold(), groups_apart=self._groups_apart)
        return tuple(Run(tuple(ids[index] for index in bucket)) for bucket in buckets)

    def take_contested(self) -> set[int]:
        """At the leader: ids newly reported by ranks here that others may vote for."""
        contested, self._contested = self._contested, set()
        return contested

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _state_of(self, key: Key) -> RequestState:
        self._touched[key] = None
        return self._states.setdefault(key, RequestState())

    def _contest(self, key: Key) -> None:
        id = self._ids.get(key)
        if id is not None:
            self._contested.add(id)

    def _note_join(self, rank: int) -> None:
        self._last_joined = rank
        self._unsent_joins.append(rank)
        self._touched.update(dict.fromkeys(self._states))

    def _add_report(self, child: int, key: Key, signatures: tuple[RankSignature, ...], joined: bool) -> None:
        if key[0] in self._removed_sets:
            return  # it was sent before its sender had read the removal
        if child in self._position.host_ranks:
            self._contest(key)
        state = self._state_of(key)
        state.children.add(child)
        state.joined |= joined
        for signature in signatures:
            state.add(signature)

    def _members_below(self, key: Key) -> dict[int, frozenset[int]]:
        """The children with members of the request's set below them, and these members."""
        process_set_id = key[0]
        below = self._below_of_set.get(process_set_id)
        if below is None:
            members = self._members(process_set_id)
            parts = {child: ranks & members for child, ranks in self._position.children.items()}
            below = {child: ranks for child, ranks in parts.items() if ranks}
            self._below_of_set[process_set_id] = below  # ids of process sets are never used again
        return below

    def _members(self, id: SetId) -> frozenset[int]:
        if isinstance(id, tuple) and id not in self._process_sets:
            self._process_sets[id] = frozenset(id)
        return self._process_sets[id]

    def _take_ready(self) -> list[Key]:
        """The touched requests that this whole subtree is ready for, first ready first."""
        touched, self._touched = self._touched, {}
        ready = []
        for key in touched:
            state = self._states[key]
            is_missing = not state.mine and self._position.rank in self._members(key[0])
            if state.sent or (is_missing and not self._joined):
                continue
            below = self._members_below(key)
            missing = below.keys() - state.children
            if all(below[child] <= self._joined_below for child in missing):
                state.sent = True
                state.joined |= is_missing or bool(missing)
                ready.append(key)
        return ready

    def _report(self, key: Key) -> Report | CachedReport:
        state = self._states[key]
        first = state.signatures[0]
        id = self._ids.find(key, first.signature)
        if id is not None and len(state.signatures) == 1:
            return CachedReport(id, first.rank, state.joined)
        return Report(key, tuple(state.signatures), state.joined)

    def _refusal(self, key: Key, state: RequestState) -> Refuse | None:
        first = state.signatures[0]
        if len(state.signatures) > 1:
            other = state.signatures[1]
            return Refuse(key, explain(key, first.signature, first.rank, other.signature, other.rank))
        if not state.joined:
            return None
        joined = self._joined_below | ({self._position.rank} if self._joined else set())
        text = not_with_join(key, first.signature, sorted(joined & self._members(key[0])))
        return None if text is None else Refuse(key, text, is_disagreement=False)

    def _forget(self, id: int) -> None:
        self._ids.forget(id, self._num_applied)
        self._contested.discard(id)

    def _drop_readable(self) -> None:
        """Drop the forgotten ids that no child can send any more."""
        if self._ids.has_readable:
            self._ids.drop_readable(min(self._children_applied.values(), default=self._num_applied))

    def _run(self, entry: Run) -> Bucket:
        requests = []
        for id in entry.ids:
            key, signature = self._ids.use(id)
            self._states.pop(key, None)
            self._touched.pop(key, None)
            requests.append((key, signature))
        return Bucket(tuple(requests))
