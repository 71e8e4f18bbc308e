"""The engine: one thread per worker that agrees with the other ranks on what to do next, and does it.

:meth:`Engine.submit` is the only way in. The thread sleeps in one ``select`` over a bell (new requests, finished work)
and the connections to its neighbours in the tree, so it notices a dead peer while work is under way, and an idle worker
costs no CPU.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack

import torch

from hvd_cluster.engine.buffers import BufferPool
from hvd_cluster.engine.collectives.step import Step
from hvd_cluster.engine.execution import Execution, ExecutionQueue
from hvd_cluster.engine.mailbox import Mailbox
from hvd_cluster.engine.negotiation import Bucket, Close, Entry, JoinDone, Negotiator, Refuse, Up
from hvd_cluster.engine.neighbours import Message, NeighbourGone, Neighbours
from hvd_cluster.engine.request import Handle, Key, Kind, Request, Signature, element_dtype
from hvd_cluster.engine.stall import Message as StallMessage
from hvd_cluster.engine.stall import Question, StallInspector
from hvd_cluster.engine.timeline import JobTimeline, Recorder
from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.transports.select import TransportTable
from hvd_cluster.engine.world import World
from hvd_cluster.errors import SHUT_DOWN_TEXT, HorovodInternalError
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

#: A transport that fails often does so because a rank has died, and the news of that is on its way.
_NEWS_S = 0.5
#: How long the engine waits at the end for the ranks below it.
_FAREWELL_S = 10.0


class Engine:
    """Carries out the collectives of one rank.

    Args:
        world: the connected world; the engine owns it from here on.
        settings: the knobs.
        process_sets: the ranks of each process set; the global set has id 0.
    """

    def __init__(self, world: World, settings: Settings, process_sets: dict[int, tuple[int, ...]]) -> None:
        self.world = world
        self.process_sets = process_sets
        self._settings = settings
        self._rank = world.topology.rank
        self._recorder = Recorder(self._rank, world.topology.host)
        self._is_root = world.place.parent is None
        self._selector = selectors.DefaultSelector()
        self._neighbours = Neighbours(world, self._selector)
        self._timeline = JobTimeline(
            self._recorder, None if self._is_root else lambda events: self._neighbours.send_up(("events", events))
        )
        self._buffers = BufferPool()
        self._numbers: Counter[tuple[int, str]] = Counter()
        #: A world of one works in its callers' threads, one at a time.
        self._alone = threading.RLock()
        self._transports = TransportTable(world, settings, process_sets, self._neighbours.check)
        for process_set_id in sorted(process_sets):
            self._transports.build(process_set_id)
        self._negotiator = Negotiator(
            world.place,
            {id: frozenset(ranks) for id, ranks in process_sets.items()},
            settings.cache_capacity,
            lambda: self._settings.fusion_threshold_bytes,
            settings.disable_group_fusion,
        )
        self._queues = {id: ExecutionQueue(self._work_done) for id in process_sets}
        #: Queues of removed process sets, until what was decided before the removal is done.
        self._draining: dict[int, ExecutionQueue] = {}
        self._next_process_set_id = len(process_sets)
        self._stall = StallInspector(
            self._rank,
            world.hosts,
            process_sets,
            settings,
            send_up=self._tell_of_stall,
            send_down=lambda message: self._neighbours.send_down(("stall", message)),
            abort=self._abort,
        )

        self._mailbox = Mailbox()
        self._selector.register(self._mailbox.bell, selectors.EVENT_READ)
        # The engine's thread only.
        self._finished: deque[tuple[Execution, Step]] = deque()
        self._flush_s: float | None = None
        self._join_handle: Handle | None = None
        self._join_device = -1
        self._deciding: list[Request] = []
        self._closing_since_s: float | None = None

        self._thread: threading.Thread | None = None
        if world.topology.size > 1:
            self._thread = threading.Thread(target=self._run, name="hvd-engine", daemon=True)
            self._thread.start()

    @property
    def has_dynamic_process_sets(self) -> bool:
        """Process sets may be added and removed."""
        return self._settings.dynamic_process_sets

    # ---- any thread -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, *, urgent: bool = False) -> Handle:
        """Hand in a request.

        Args:
            request: what to do; its tensors must not be touched until the handle is done.
            urgent: somebody waits for it already, so it is not held back for company.

        Raises:
            ValueError: a request of this name is under way, or this rank is not in the process set.
            HorovodInternalError: the world has ended.
        """
        members = self.process_sets.get(request.process_set_id)
        if members is None:
            raise ValueError("Process set does not exist or has not been registered.")
        if self._rank not in members:
            raise ValueError(
                f"{request.signature.kind.value.capitalize()}: Rank {self._rank} is not a member of the provided "
                "process set."
            )
        if self._thread is None:
            self._run_alone(request)
            return request.handle
        if threading.current_thread() is self._thread:
            raise HorovodInternalError(
                f"{request.name!r} was submitted from the engine's own thread, perhaps by a __del__ that ran there: "
                "it could wait for nobody but itself"
            )
        self._mailbox.submit(request, urgent=urgent)
        return request.handle

    def flush(self) -> None:
        """Somebody waits: negotiate now what was submitted, without waiting for company."""
        self._mailbox.hurry()

    def join(self, device: int = -1) -> Handle:
        """This rank has run out of data; the handle gives the rank that joined last, once all have.

        Args:
            device: the GPU that the zeros for GPU tensors are made on.

        Raises:
            ValueError: this rank has joined already.
        """
        handle = Handle()
        if self._thread is None:
            handle.succeed(self._rank)
        else:
            self._mailbox.join(handle, device)
        return handle

    def next_number(self, process_set_id: int, family: str) -> int:
        """The next number of unnamed operations of one family; a new world counts anew, on all ranks alike."""
        with self._alone:
            number = self._numbers[process_set_id, family]
            self._numbers[process_set_id, family] += 1
            return number

    def return_number(self, process_set_id: int, family: str, number: int) -> None:
        """An operation was refused on this rank and took no part: its number goes to the next one."""
        with self._alone:
            if self._numbers[process_set_id, family] == number + 1:
                self._numbers[process_set_id, family] = number

    def record_timeline(self, path: str | None, mark_cycles: bool = False) -> None:
        """Start the job's timeline at ``path``, or stop it (None). Only rank 0's call has an effect, on all ranks."""
        if self._rank != 0:
            return
        if self._thread is None:
            self._set_timeline(path, mark_cycles)
        else:
            self._mailbox.command("timeline", (path, mark_cycles))

    def shutdown(self) -> None:
        """Leave in good order: what all ranks had agreed on is finished, the rest fails on every rank."""
        if self._thread is None:
            self._timeline.stop()
            self._timeline.close()
            self._release()
        else:
            self._mailbox.command("leave")
            self._thread.join(self._settings.gloo_timeout_s + _FAREWELL_S)
            if self._thread.is_alive():
                logger.warning("rank %d: the engine did not stop in time; its connections are cut", self._rank)
                self._mailbox.command("abort", "shutdown() was called, but another rank did not answer")
                self._thread.join(_FAREWELL_S)
            self._release()
        self.world.close()

    def abandon(self) -> None:
        """In a forked child: let go of the connections without ending them; they are the parent's."""
        for link in self.world.links.values():
            link.close()
        self._selector.close()
        self._mailbox.abandon()

    def _release(self) -> None:
        self._selector.close()
        self._mailbox.close()

    def _work_done(self, execution: Execution, step: Step) -> None:
        self._finished.append((execution, step))
        self._mailbox.ring()

    # ---- a world of one: the caller's thread does it ----------------------------------------------------------------

    def _run_alone(self, request: Request) -> None:
        device = request.inputs[0].device if request.inputs else torch.device("cpu")
        transport = AloneTransport(device, self._rank)
        with self._alone:
            execution = Execution([request], transport, self._buffers, self._recorder)
            execution.advance(lambda *_: None)
            self._timeline.flush()

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        except NeighbourGone as gone:
            self._abort(gone.reason, gone.source)
        except Exception as error:
            # Whatever it was, every rank must hear of it: a thread that dies in silence leaves all others waiting.
            logger.debug("rank %d: the engine failed", self._rank, exc_info=True)
            culprit = self._neighbours.await_news(_NEWS_S) if isinstance(error, RuntimeError) else None
            if culprit is not None:
                self._abort(culprit.reason, culprit.source)
            else:
                self._abort(f"rank {self._rank} on {self.world.topology.host} failed: {type(error).__name__}: {error}")
        finally:
            with ExitStack() as ends:  # each of them, whatever becomes of the others
                for link in self.world.links.values():
                    ends.callback(link.close)
                ends.callback(self._transports.close)
                ends.callback(self._neighbours.send_all, ("bye", None))
                ends.callback(self._timeline.close)
                ends.callback(self._timeline.stop)

    def _turn(self) -> None:
        for key, events in self._selector.select(0 if self._neighbours.has_message else self._timeout_s()):
            if key.data is None:
                self._mailbox.silence()
            elif events & selectors.EVENT_READ:
                self._hear(key.data)
            else:
                self._neighbours.flush(key.data)
        for rank, message in self._neighbours.take():
            self._take_message(rank, message)
        self._take_commands()
        self._take_submissions()
        self._take_finished()
        self._settle()
        self._timeline.flush()
        self._stall.inspect(list(self._mailbox.pending().values()))
        self._neighbours.rearm()

    def _timeout_s(self) -> float | None:
        farewell_s = None if self._closing_since_s is None else self._closing_since_s + _FAREWELL_S
        stall_s = self._stall.next_check_s(list(self._mailbox.pending().values()))
        times = (self._flush_s, self._timeline.next_flush_s, stall_s, farewell_s)
        deadlines = [time_s for time_s in times if time_s is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _take_commands(self) -> None:
        for name, argument in self._mailbox.take_commands():
            if name == "join":
                # What was submitted before counts as submitted: a joined rank's word would stand in for it otherwise,
                # and the late report be taken for the next request of that name.
                self._negotiate()
                self._join_handle, self._join_device = argument
                self._stall.note_join()
                self._negotiator.join()
            elif name == "leave":
                self._negotiator.leave(self._rank)
            elif name == "timeline":
                self._neighbours.send_down(("timeline", argument))
                self._set_timeline(*argument)
            else:
                raise RuntimeError(argument)

    def _take_submissions(self) -> None:
        """Negotiate what was submitted, once somebody waits for it or it has waited for a cycle."""
        if not self._mailbox.has_submitted:
            return
        now_s = time.monotonic()
        if not self._mailbox.is_urgent:
            if self._flush_s is None:
                self._flush_s = now_s + self._settings.cycle_time_ms / 1000
            if now_s < self._flush_s:
                return
        self._negotiate()

    def _negotiate(self) -> None:
        self._flush_s = None
        self._recorder.mark_cycle()
        for request in self._mailbox.take_submitted():
            self._stall.note(request.name)
            self._negotiator.submit(request.key, request.signature)

    def _take_finished(self) -> None:
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        if finished:
            for queue in self._all_queues():
                queue.advance(finished)
        for id in [id for id, queue in self._draining.items() if not queue]:
            del self._draining[id]
            self._transports.remove(id)

    def _all_queues(self) -> list[ExecutionQueue]:
        return [*self._queues.values(), *self._draining.values()]

    def _settle(self) -> None:
        """Pass on what is ready: up to the parent, or, at the root, into the log."""
        if self._closing_since_s is not None:
            return
        if not self._is_root:
            message = self._negotiator.take_up()
            if message is not None:
                self._neighbours.send_up(("up", message))
            return
        # Carrying out a bucket may bring the end, or free a name that was waiting to be negotiated.
        while entries := self._negotiator.take_log():
            self._apply(entries)

    def _apply(self, entries: tuple[Entry, ...]) -> None:
        """One log message: forward it, then do what it says."""
        is_last = any(isinstance(entry, Close) for entry in entries)
        self._neighbours.send_down(("close" if is_last else "log", entries))
        for decision in self._negotiator.apply(entries):
            if isinstance(decision, Bucket):
                self._execute(decision)
            elif isinstance(decision, Refuse):
                request = self._mailbox.decide(decision.key)
                if request is not None:
                    request.handle.fail(HorovodInternalError(decision.text))
            elif isinstance(decision, JoinDone):
                self._mailbox.unjoin()
                if self._join_handle is not None:
                    handle, self._join_handle = self._join_handle, None
                    handle.succeed(decision.last_rank)
            else:
                self._close(decision)

    def _execute(self, bucket: Bucket) -> None:
        process_set_id, first = bucket.requests[0][0][0], bucket.requests[0][1]
        if first.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            self._change_process_sets(bucket.requests[0][0], first)
            return
        if self._rank not in self.process_sets[process_set_id]:
            return
        now_s = time.monotonic()
        # If anything below raises, these are neither pending nor in a queue, and _abort() has to find them.
        requests = self._deciding = []
        for key, signature in bucket.requests:
            request = self._mailbox.decide(key) or _zeros(key, signature, self._join_device)
            for name in request.tensor_names:
                self._recorder.span(name, f"NEGOTIATE_{signature.kind.name}", request.submitted_s, now_s)
            requests.append(request)
        devices = [tensor.device for request in requests for tensor in request.inputs]
        transport = self._transports[process_set_id, devices[0] if devices else torch.device("cpu")]
        self._queues[process_set_id].append(Execution(requests, transport, self._buffers, self._recorder))
        self._deciding = []

    def _change_process_sets(self, key: Key, signature: Signature) -> None:
        """Add or remove a process set; every rank does so at the same place of the log."""
        request = self._mailbox.decide(key)
        if signature.kind == Kind.ADD_PROCESS_SET:
            id = self._next_process_set_id
            self._next_process_set_id += 1
            self._negotiator.add_process_set(id, frozenset(signature.ranks))
            self.process_sets[id] = signature.ranks
            self._queues[id] = ExecutionQueue(self._work_done)
            self._transports.build(id)
        else:
            id = next(id for id, ranks in self.process_sets.items() if ranks == signature.ranks)
            self._negotiator.remove_process_set(id)
            del self.process_sets[id]
            for orphan in self._mailbox.withdraw(id):
                orphan.handle.fail(HorovodInternalError(f"the process set of {orphan.name!r} was removed"))
            self._draining[id] = self._queues.pop(id)
        if request is not None:
            request.handle.succeed(id)

    def _set_timeline(self, path: str | None, mark_cycles: bool) -> None:
        if path is None:
            self._timeline.stop()
        else:
            self._timeline.start(path, mark_cycles)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _hear(self, rank: int) -> None:
        try:
            self._neighbours.receive(rank)
        except NeighbourGone as gone:
            # An end without a farewell, while something all had agreed on is under way, is no end in good order.
            is_expected = self._closing_since_s is not None and (
                self._neighbours.has_said_bye(rank) or not any(self._all_queues())
            )
            if not is_expected:
                self._abort(gone.reason, gone.source)

    def _take_message(self, rank: int, message: Message) -> None:
        kind, content = message
        if kind == "up":
            up: Up = content
            self._negotiator.hear(rank, up)
        elif kind in ("log", "close"):
            self._apply(content)
        elif kind == "bye":
            self._neighbours.note_bye(rank)
        elif kind == "events":
            self._timeline.write(content)
        elif kind == "stall":
            self._hear_of_stall(content)
        elif kind == "timeline":
            self._neighbours.send_down(message)
            self._set_timeline(*content)
        else:
            self._abort(content, rank)

    def _tell_of_stall(self, message: StallMessage) -> None:
        if self._is_root:
            self._hear_of_stall(message)
        else:
            self._neighbours.send_up(("stall", message))

    def _hear_of_stall(self, message: StallMessage) -> None:
        """Questions travel down to every rank, everything else up to the root."""
        pending = self._mailbox.pending()
        if isinstance(message, Question):
            self._neighbours.send_down(("stall", message))
            self._stall.hear(message, pending)
        elif self._is_root:
            self._stall.hear(message, pending)
        else:
            self._neighbours.send_up(("stall", message))

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _close(self, close: Close) -> None:
        """The world ends in good order: what stands before in the log is finished, the rest fails."""
        self._closing_since_s = time.monotonic()
        who = "this rank" if close.rank == self._rank else f"rank {close.rank} on {self.world.hosts[close.rank]}"
        self._fail_pending(f"{SHUT_DOWN_TEXT} ({who} has called shutdown or ended)")

    def _is_over(self) -> bool:
        """After a close: everything decided is done, and the ranks below have said farewell (or had time to)."""
        if self._mailbox.has_ended and self._closing_since_s is None:
            return True
        if self._closing_since_s is None or any(self._all_queues()):
            return False
        if self._neighbours.has_children:
            return time.monotonic() - self._closing_since_s > _FAREWELL_S
        return True

    def _abort(self, reason: str, source: int | None = None) -> None:
        """The world is broken: tell the neighbours, fail everything, wake what waits in the transports."""
        if self._mailbox.has_ended and self._closing_since_s is None:
            return
        self._closing_since_s = None
        self._neighbours.send_all(("abort", reason), but=source)
        text = f"{SHUT_DOWN_TEXT} ({reason})"
        self._fail_pending(text)
        try:
            # Before the waiters wake: they may write the tensors that a transport still works on.
            self._transports.abort()
        finally:
            for queue in self._all_queues():
                queue.fail(lambda: HorovodInternalError(text))
            for request in self._deciding:
                request.handle.fail(HorovodInternalError(text))

    def _fail_pending(self, text: str) -> None:
        self._mailbox.end(text)
        self._flush_s = None
        if self._join_handle is not None:
            handle, self._join_handle = self._join_handle, None
            handle.fail(HorovodInternalError(text))


def _zeros(key: Key, signature: Signature, gpu: int) -> Request:
    """What a joined rank contributes to a request that it has not submitted."""
    tensors = [
        torch.zeros(
            meta.shape,
            dtype=element_dtype(meta.dtype),
            device=torch.device(meta.device, gpu) if meta.device == "cuda" and gpu >= 0 else torch.device(meta.device),
        )
        for meta in signature.tensors
    ]
    return Request(
        name=key[1],
        process_set_id=key[0],
        signature=signature,
        inputs=tensors,
        outputs=tensors,
        finish=lambda _: None,
        handle=Handle(),
    )
