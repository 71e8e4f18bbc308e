"""Execution of what all ranks have agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from hvd_cluster.engine.autotune import Observation, Tuner
from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.execution import Execution, execute_inline
from hvd_cluster.engine.launched_work import LaunchedWork
from hvd_cluster.engine.messages import Bucket, JoinDone, Refuse, Tune
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.queues import Queues
from hvd_cluster.engine.request import Handle, Request, neutral_for
from hvd_cluster.engine.signature import Key, Kind, Signature, ranks_of
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.engine.timeline import Recorder
from hvd_cluster.engine.transports.select import TransportTable
from hvd_cluster.errors import HorovodInternalError, JoinUnsupportedError, RanksDisagreeError, WorldEndedError
from hvd_cluster.monitor.step_clock import step_clock

_CPU = torch.device("cpu")


class DecisionRunner:
    """Executes decisions in the order of the log.

    Args:
        rank: this rank.
        process_sets: the ranks of each process set; grows and shrinks with the dynamic ones.
        has_all_ranks_here: the whole world is on this host.
        submissions: the requests of this rank.
        negotiator: learns of new and removed process sets.
        transports: those of this rank.
        queues: the buckets that are being executed.
        launched_work: learns what is launched on devices.
        recorder: the timeline.
        tuner: at the root, if autotune searches.
        tune: proposes other parameters to all ranks.
    """

    def __init__(
        self,
        rank: int,
        process_sets: dict[int, tuple[int, ...]],
        *,
        has_all_ranks_here: bool,
        submissions: SubmissionQueue,
        negotiator: Negotiator,
        transports: TransportTable,
        queues: Queues,
        launched_work: LaunchedWork,
        recorder: Recorder,
        tuner: Tuner | None,
        tune: Callable[[Tune], None],
    ) -> None:
        self._rank = rank
        self._process_sets = process_sets
        self._next_process_set_id = len(process_sets)
        self._has_all_ranks_here = has_all_ranks_here
        self._submissions = submissions
        self._negotiator = negotiator
        self._transports = transports
        self._queues = queues
        self._launched_work = launched_work
        self._recorder = recorder
        self._tuner = tuner
        self._tune = tune
        self._buffers = BufferPool()
        self._join_handle: Handle | None = None
        self._join_device = -1
        #: Requests that are neither pending nor in a queue.
        self._deciding: list[Request] = []

    def join(self, handle: Handle, device: int) -> None:
        """This rank has joined; ``handle`` succeeds when all have."""
        self._join_handle, self._join_device = handle, device

    def execute(self, decision: Bucket | Refuse | JoinDone) -> None:
        """Execute a decision; a bucket may still be in progress when this returns."""
        self._submissions.num_decisions += 1
        if isinstance(decision, Bucket):
            self._execute_bucket(decision)
        elif isinstance(decision, Refuse):
            request = self._submissions.decide(decision.key)
            if request is not None:
                kind = RanksDisagreeError if decision.is_disagreement else JoinUnsupportedError
                request.handle.fail(kind(decision.text))
        else:
            self._submissions.end_join()
            step_clock.end_join()
            if self._join_handle is not None:
                handle, self._join_handle = self._join_handle, None
                handle.succeed(decision.last_rank)

    def fail_pending(self, text: str) -> None:
        """The world has ended: fail what is not decided yet."""
        self._submissions.end(text)
        if self._join_handle is not None:
            handle, self._join_handle = self._join_handle, None
            handle.fail(WorldEndedError(text))

    def fail(self, text: str) -> None:
        """Fail everything in progress; the transports were aborted."""
        self._queues.fail(lambda: WorldEndedError(text))
        for request in self._deciding:
            request.handle.fail(WorldEndedError(text))

    def _execute_bucket(self, bucket: Bucket) -> None:
        process_set_id, first = bucket.requests[0][0][0], bucket.requests[0][1]
        if first.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            self._change_process_sets(bucket.requests[0][0], first)
            return
        # The set may have been removed: at a leader, its removal can enter the log before earlier reports.
        if process_set_id and self._rank not in ranks_of(self._process_sets, process_set_id):
            return
        self._launched_work.latest = keys = [key for key, _ in bucket.requests]
        mine = self._submissions.begin(keys)
        # If anything below raises, fail() has to find these.
        self._deciding = [request for request in mine if request is not None]
        if len(self._deciding) < len(mine) and self._join_handle is None:
            # Zeros in its place would silently give a wrong result.
            names = ", ".join(key[1] for key, request in zip(keys, mine, strict=True) if request is None)
            raise RuntimeError(f"all ranks were taken to have submitted {names}, and this one has not")
        now_s = time.monotonic()
        for request in self._deciding:
            request.handle.decided_s = now_s
        requests = self._deciding
        if len(requests) < len(mine):
            gpu = self._transports.gpu(process_set_id, self._join_device)
            requests = [
                request if request is not None else neutral_for(key, signature, gpu)
                for request, (key, signature) in zip(mine, bucket.requests, strict=True)
            ]
        if self._recorder.enabled:
            for request in requests:
                for name in request.tensor_names:
                    phase = f"NEGOTIATE_{request.signature.kind.name}"
                    self._recorder.span(name, phase, request.submitted_s, now_s)
        inputs = requests[0].inputs
        device = inputs[0].device if inputs else _CPU
        if (process_set_id, device) not in self._transports:
            self._queues.finish_exclusive()
        transport = self._transports[process_set_id, device]
        waits_for_host = transport.ends_in_caller or transport.for_sizes.ends_in_caller
        if transport.is_exclusive or (waits_for_host and not self._has_all_ranks_here):
            # It waits for ranks of this host, which may wait for this rank in a bucket that spans hosts.
            self._queues.finish_exclusive(but=process_set_id)
        buckets = self._queues[process_set_id]
        observe = None if self._tuner is None else self._observe
        decided_s = 0.0 if observe is None else time.monotonic()
        release = partial(self._submissions.finish, keys)
        if buckets or not execute_inline(requests, transport, self._buffers, self._recorder, release):
            watch = partial(self._launched_work.add, self._submissions.num_decisions, keys)
            buckets.append(Execution(requests, transport, self._buffers, self._recorder, release, observe, watch))
        elif observe is not None:
            observe(requests, decided_s, time.monotonic())
        self._deciding = []

    def _observe(self, requests: list[Request], decided_s: float, done_s: float) -> None:
        """Report an executed bucket to the tuner, at the root while autotune searches."""
        if self._tuner is None or requests[0].signature.kind != Kind.ALLREDUCE:
            return
        parameters = self._tuner.observe(Observation.of(requests, decided_s, done_s))
        if parameters is not None:
            self._tune(Tune(parameters.fusion_threshold_bytes, parameters.cycle_time_ms))
        if self._tuner.is_done:
            self._tuner = None

    def _change_process_sets(self, key: Key, signature: Signature) -> None:
        """Add or remove a process set, at the same position of the log on every rank."""
        request = self._submissions.decide(key)
        self._deciding = [] if request is None else [request]
        if signature.kind == Kind.ADD_PROCESS_SET:
            id = self._next_process_set_id
            self._next_process_set_id += 1
            self._negotiator.add_process_set(id, frozenset(signature.ranks))
            self._process_sets[id] = signature.ranks
            self._queues.add(id)
            self._queues.finish_exclusive()
            self._transports.build(id)
        else:
            id = next(id for id, ranks in self._process_sets.items() if ranks == signature.ranks)
            self._negotiator.remove_process_set(id)
            del self._process_sets[id]
            for orphan in self._submissions.withdraw(id):
                orphan.handle.fail(HorovodInternalError(f"the process set of {orphan.name!r} was removed"))
            self._queues.remove(id)
        self._deciding = []
        if request is not None:
            request.handle.succeed(id)
