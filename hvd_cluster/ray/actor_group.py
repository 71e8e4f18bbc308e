"""A fixed number of workers that keep their state between calls."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import hvd_cluster
from hvd_cluster.errors import LaunchError, StartTimeoutError, WorkerFailedError
from hvd_cluster.launch.call import PackedCall
from hvd_cluster.launch.outcome import Outcome, collect
from hvd_cluster.launch.placement import Placement, Slot, place
from hvd_cluster.launch.worker_group import Callbacks, WorkerGroup
from hvd_cluster.oldpaths.shim import serves_horovod
from hvd_cluster.ray import nodes
from hvd_cluster.ray.actor import ActorCall, ActorWorker, OnLog, ignore_log
from hvd_cluster.ray.callbacks import CallbackLoop
from hvd_cluster.ray.messages import ActorHandshake
from hvd_cluster.ray.resources import device_env
from hvd_cluster.ray.session import ENDED, Connection, connect, first_line, full_store, load_ray
from hvd_cluster.ray.start_watch import late_text, slow_parts
from hvd_cluster.ray.strategy import Reservation, Strategy
from hvd_cluster.ray.worker import BaseHorovodWorker, WorkerAssignment
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer
from hvd_cluster.rendezvous.sockets import LOOPBACK
from hvd_cluster.topology import join_address

logger = logging.getLogger(__name__)

#: A larger call is put into the object store once, instead of into the message for each worker.
_SHARED_BYTES = 64 * 1024


class ActorGroup:
    """The actors of one executor, and their placement group."""

    def __init__(
        self,
        strategy: Strategy,
        callbacks: Callbacks,
        env: Mapping[str, str | None],
        *,
        placement_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._strategy = strategy
        self._callbacks = callbacks
        self._env = dict(env)
        self._placement_timeout_s = placement_timeout_s
        self._start_timeout_s = start_timeout_s
        self._running: ExitStack | None = None
        self._connection = Connection()
        self._group: WorkerGroup[ActorWorker] = WorkerGroup()
        self._why_closed = "start() has not been called"
        self._settled = True

    def start(self, executable: PackedCall | None) -> None:
        """Start the workers, and let each create its executable (a packed call).

        Raises:
            StartTimeoutError: there is no room in the cluster, or workers do not report.
            WorkerFailedError: a worker died, or its executable raised an exception.
            LaunchError: they cannot work together.
        """
        if self._running is not None:
            logger.warning("start() was called again: the workers of the earlier call end, with all that they hold")
        self.close()
        try:
            with ExitStack() as stack:
                self._start_actors(stack)
                self._running = stack.pop_all()
            if executable is not None:
                self.call(ActorCall("prepare", (executable,)))
        except BaseException:  # also after an interrupt: an incomplete group must not remain
            self.close("it did not start")
            raise

    def call(self, call: ActorCall, callbacks: CallbackLoop | None = None, *, is_last: bool = False) -> list[Any]:
        """Run ``call`` on every worker. Returns the results by rank.

        Args:
            callbacks: called with what workers log.
            is_last: the workers end with this call, so objects in their results that they own are stored by this
                process.

        Raises:
            WorkerFailedError: a worker raised an exception or died; the message starts with the user's traceback. If
                one died, or hung after another one's failure, all have ended, and :meth:`start` starts new ones.
        """
        workers, call = self._workers(), shared(call)

        def work() -> list[Outcome]:
            self._settle()
            return self._reports_of(call)

        with self._calling(workers, ignore_log if callbacks is None else callbacks.put):
            failed = partial(self.close, "a callback of an earlier call has raised an exception, or it was interrupted")
            outcomes = work() if callbacks is None else callbacks.until(work, failed)
            if is_last:
                outcomes = [worker.detached(outcome) for worker, outcome in zip(workers, outcomes, strict=True)]
        return collect(outcomes)

    def call_one(self, call: ActorCall) -> Any:
        """Run ``call`` on rank 0 only. Returns its result; raises as :meth:`call`."""
        worker, call = self._workers()[0], shared(call)
        with self._calling([worker]):
            worker.submit(call)
            outcome = self._group.report_of(worker)
            worker.forget_report()
        return collect([outcome])[0]

    @contextmanager
    def _calling(self, workers: Sequence[ActorWorker], on_log: OnLog = ignore_log) -> Iterator[None]:
        self._callbacks.on_call()
        for worker in workers:
            worker.on_log = on_log
        try:
            yield
        except BaseException:  # an interrupt: no caller waits for what the workers are doing now
            self.close("a call was interrupted")
            raise
        if not self._group.all_live:
            self.close("a worker died or hung in an earlier call")

    def call_remote(self, call: ActorCall) -> list[Any]:
        """Start a call on every worker; return the ``ObjectRef`` of each by rank."""
        workers, call = self._workers(), shared(call)
        self._callbacks.on_call()
        for worker in workers:
            worker.on_log = ignore_log  # without the callbacks of an earlier call
        self._settled = False
        return [worker.submit_remote(call) for worker in workers]

    def _settle(self) -> None:
        """Wait for the calls of :meth:`call_remote`.

        So no rank begins a call while others are in an earlier one.

        Raises:
            WorkerFailedError: one of them failed on a rank, and did not end on another one; all workers have ended.
            LaunchError: a worker has died since.
        """
        if self._settled:
            return
        outcomes = self._reports_of(ActorCall("settle", ()))
        self._settled = True
        if self._group.all_live:
            return  # whatever they raised is in the caller's references
        self.close("a worker died or hung in an earlier call")
        try:
            collect(outcomes)
        except WorkerFailedError as error:
            raise WorkerFailedError(
                f"{error}\nThis happened in an earlier run_remote(), which did not end on the other ranks: all workers "
                "were ended. Pass what run_remote() returns to ray.get() to meet such errors where they occur.",
                error.rank,
                error.exit_code,
                error.died,
            ) from error.__cause__
        self._workers()  # raises: they have ended

    def _reports_of(self, call: ActorCall) -> list[Outcome]:
        """Run ``call`` on every worker. Returns the outcomes."""
        for worker in self._group.workers:
            worker.submit(call)
        outcomes = self._group.reports()
        for worker in self._group.workers:
            worker.forget_report()
        return outcomes

    def close(self, why: str = "shutdown() has been called") -> None:
        """End the workers and remove their placement group. May be called twice."""
        running, self._running = self._running, None
        if running is not None:
            self._why_closed = why
            running.close()

    def _workers(self) -> list[ActorWorker]:
        if self._running is not None and self._connection.has_ended:
            self.close(ENDED)
        if self._running is not None and not self._group.all_live:
            self.close("a worker died between two calls")
        if self._running is None:
            raise LaunchError(f"the executor has no workers: {self._why_closed}. Call start() first.")
        return self._group.workers

    # --- the start ---------------------------------------------------------------------------------------------------

    def _start_actors(self, stack: ExitStack) -> None:
        connect()
        self._connection = Connection.current()
        reservation = self._strategy.reserve(self._placement_timeout_s)
        size = len(reservation.bundles)
        stack.callback(_quietly, reservation.release)
        handles = self._actors(reservation, size, stack)
        secret, job_id = new_secret(), uuid.uuid4().hex[:12]
        refs = [handle.handshake.remote(secret) for handle in handles]
        handshakes = self._handshakes(refs)
        is_one_node = all(handshake.address == nodes.own_address() for handshake in handshakes)
        placements = place_actors(handshakes, is_one_node)
        address = LOOPBACK if is_one_node else nodes.own_address()
        server = stack.enter_context(KeyValueServer(secret, address))
        first = placements[0].slot
        self._group = WorkerGroup()
        stack.callback(self._group.stop, 0.0)
        logger.info("job %s: %d workers on %d nodes", job_id, size, len({g.node_id for g in handshakes}))

        def starter(placement: Placement) -> Callable[[Callbacks], ActorWorker]:
            topology = placement.topology(
                rendezvous=join_address(address, server.port),
                master=join_address(first.address, handshakes[first.index].master_port),
                secret=secret,
                job_id=job_id,
            )
            assignment = WorkerAssignment(
                topology, {**device_env(placement.visible_devices), **self._env}, serves_horovod()
            )
            index = placement.slot.index
            return partial(
                ActorWorker, self._connection, handles[index], refs[index], placement.rank, lambda _: assignment
            )

        self._group.start(map(starter, placements), self._callbacks)
        self._group.wait_ready(self._start_timeout_s)
        if ended := [worker.outcome for worker in self._group.workers if worker.outcome is not None]:
            collect(ended)

    def _actors(self, reservation: Reservation, size: int, stack: ExitStack) -> list[Any]:
        ray = load_ray()
        actor_class = ray.remote(BaseHorovodWorker)
        handles = []
        for index in range(size):
            handle = actor_class.options(**reservation.options(index)).remote(index, size)
            stack.callback(_quietly, _kill, self._connection, handle)
            handles.append(handle)
        return handles

    def _handshakes(self, refs: Sequence[Any]) -> list[ActorHandshake]:
        ray = load_ray()
        _, late = ray.wait(refs, num_returns=len(refs), timeout=self._start_timeout_s)
        if late:
            slots = ", ".join(str(refs.index(ref)) for ref in late)
            raise StartTimeoutError(
                f"{len(late)} of {len(refs)} workers did not start within {self._start_timeout_s:g} s (actors "
                f"{slots}). {late_text(self._start_timeout_s, slow_parts())}"
            )
        try:
            handshakes: list[ActorHandshake] = ray.get(list(refs))
        except ray.exceptions.RayError as error:
            raise LaunchError(f"a worker could not be started on Ray: {error}") from error
        check_versions(handshakes)
        return handshakes


def shared(call: ActorCall) -> ActorCall:
    """``call`` with its large arguments in the object store.

    Raises:
        LaunchError: there is no room for them.
    """
    return replace(call, arguments=tuple(_put(argument) for argument in call.arguments))


def _put(argument: Any) -> Any:
    if not isinstance(argument, PackedCall) or len(argument.body) <= _SHARED_BYTES:
        return argument
    ray = load_ray()
    try:
        return ray.put(argument)
    except ray.exceptions.RayError as error:
        raise (
            full_store(f"the call with its arguments ({len(argument.body) / 1e6:.0f} MB)", error) or error
        ) from error


def place_actors(handshakes: Sequence[ActorHandshake], is_one_node: bool) -> list[Placement]:
    """The placements of actors; ranks are contiguous on each Ray node.

    Raises:
        LaunchError: they do not have one GPU each.
    """
    try:
        return place(
            [
                Slot(index, handshake.node_id, LOOPBACK if is_one_node else handshake.address, handshake.gpus)
                for index, handshake in enumerate(handshakes)
            ]
        )
    except ValueError as error:
        raise LaunchError(f"the workers cannot be placed: {error}") from error


def check_versions(handshakes: Sequence[ActorHandshake]) -> None:
    """Check that all nodes have this version of hvd_cluster.

    Raises:
        LaunchError: a node has another version.
    """
    others = {g.hostname: g.version for g in handshakes if g.version != hvd_cluster.__version__}
    if others:
        there = ", ".join(f"{version} on {host}" for host, version in others.items())
        raise LaunchError(
            f"hvd_cluster is {hvd_cluster.__version__} here and {there}: install one version everywhere, for example "
            "through ray.init(runtime_env={'pip': [...]})"
        )


def _kill(connection: Connection, handle: Any) -> None:
    connection.ray().kill(handle)


def _quietly(act: Callable[..., Any], *arguments: Any) -> None:
    """Clean up; Ray itself may be gone, and everything with it."""
    try:
        act(*arguments)
    except Exception as error:  # noqa: BLE001 - see above
        logger.debug("clean-up on Ray: %s", first_line(error))
