"""Applies what the policy decides: starts and stops workers, forms worlds."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.elastic.elastic_worker import Announcer, ElasticWorker
from hvd_cluster.launch.elastic.host_manager import HostManager
from hvd_cluster.launch.elastic.policy import Action, Decision, Phase, View, decide
from hvd_cluster.launch.fleet import Fleet
from hvd_cluster.launch.outcome import Outcome, failure_text, first_failure
from hvd_cluster.launch.placement import Slot, place_keeping_local_slots
from hvd_cluster.launch.spec import ElasticSpec
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.rendezvous.client import KeyValueClient, KeyValueMailbox
from hvd_cluster.rendezvous.membership import DRIVER_BOX, TOPOLOGY_FIELDS
from hvd_cluster.rendezvous.sockets import LOOPBACK
from hvd_cluster.settings import Settings
from hvd_cluster.topology import Topology, join_address
from hvd_cluster.version import __version__

logger = logging.getLogger(__name__)

#: Seconds between two turns if no event wakes the controller.
_TICK_S = 0.25
#: Seconds between two log lines that say what the job waits for.
_LOG_INTERVAL_S = 10.0
#: Seconds between two discoveries.
_DISCOVERY_INTERVAL_S = 1.0
_READ_TIMEOUT_S = 3600.0


class ElasticController:
    """One elastic job, from its first worker to its last. A context manager.

    Args:
        fleet: starts workers on hosts; its key-value store is open.
        give_up: called with the outcome of each worker that failed. It returns why the job should end, or an empty
            string to continue.
    """

    def __init__(
        self,
        spec: ElasticSpec,
        fleet: Fleet,
        discovery: HostDiscovery,
        callbacks: Callbacks,
        give_up: Callable[[Outcome], str] = lambda _outcome: "",
    ) -> None:
        self._spec = spec
        self._fleet = fleet
        self._give_up_reason = give_up
        self._fatal_outcome: Outcome | None = None
        self._is_stopped = False
        self._leave_timeout_s = Settings.from_env().elastic_leave_timeout_s
        self._job_id = uuid.uuid4().hex[:12]
        #: Set when something may have changed.
        self._wakeup = threading.Event()
        self._callbacks = replace(callbacks, on_change=self._wakeup.set)
        #: The hosts that can take workers.
        self.hosts = HostManager(discovery, fleet, spec.cooldown_range_s, _DISCOVERY_INTERVAL_S, self._wakeup.set)
        self._keys = itertools.count()
        self._members: dict[int, ElasticWorker] = {}
        self._failed: list[Outcome] = []
        self._finished: list[Outcome] = []
        self._world: list[ElasticWorker] = []
        #: How members of the present world have failed.
        self._lost: list[Outcome] = []
        self._generation = -1
        #: A worker has reported that it has the state of the job.
        self._state_exists = False
        self._num_resets = 0
        #: None until the first turn, which follows the first discovery: the time that it takes does not count.
        self._short_since_s: float | None = None
        self._ready_since_s: float | None = None
        self._broken_since_s: float | None = None
        self._last_log = ("", 0.0)
        self._requests: list[dict[str, object]] = []
        address = join_address(LOOPBACK, fleet.server.port)
        self._client = KeyValueClient(address, fleet.secret)
        self._announcer = Announcer(self._client)
        self._request_client = KeyValueClient(address, fleet.secret)
        self._thread = threading.Thread(target=self._listen, name="hvd-elastic", daemon=True)
        self._thread.start()

    def __enter__(self) -> ElasticController:
        try:
            self.hosts.start()
        except BaseException:  # raised again; __exit__ is not called after it
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def wake_up(self) -> None:
        """Something may have changed."""
        self._wakeup.set()

    def run(self) -> list[Outcome]:
        """Run until the job has finished or cannot continue.

        Returns:
            The outcomes of the last world's members, or the one failure that ended the job.

        Raises:
            LaunchError: there were too few workers for too long, or too many resets.
        """
        hosts = self.hosts
        while True:
            self._wakeup.wait(_TICK_S)
            self._wakeup.clear()
            # First, so that the workers of a host that is lost by now are reaped in the same turn.
            usable = hosts.usable()
            self._handle_requests()
            self._reap()
            if self._fatal_outcome is not None:
                return [self._fatal_outcome]
            if self._is_stopped:
                raise LaunchError("the job was stopped")
            if self._finished and not self._members:
                return self._results()
            decision = decide(self._view(usable, hosts.blacklisted()))
            if decision.action is Action.RAISE:
                return self._give_up(decision)
            self._apply(decision, usable)

    def stop(self) -> None:
        """Make :meth:`run`, in another thread, raise LaunchError soon."""
        self._is_stopped = True
        self._wakeup.set()

    def close(self) -> None:
        """Stop every worker, and stop listening."""
        try:  # the workers first, so that they end even while a discovery blocks
            for member in self._members.values():
                member.stop()
            for member in self._members.values():
                while member.worker is not None and member.worker.outcome is None:
                    member.kill_after_grace()
                    time.sleep(0.02)
                if member.worker is not None:
                    member.worker.wait()
            self._members.clear()
            self._request_client.close()
            self._thread.join()
            self._client.close()
        finally:
            self.hosts.close()

    # --- what has happened -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Receive requests of workers; runs in a thread of its own."""
        box = KeyValueMailbox(self._request_client, DRIVER_BOX)
        while True:
            try:
                self._requests.append(json.loads(box.next(_READ_TIMEOUT_S)))
            except TimeoutError:
                continue
            except (OSError, EOFError):
                return  # closed
            self._wakeup.set()

    def _handle_requests(self) -> None:
        by_name = {member.name: member for member in self._members.values()}
        while self._requests:
            request = self._requests.pop(0)
            member = by_name.get(str(request["worker"]))
            if (version := request.get("version")) != __version__:
                if member is not None and not member.is_leaving:
                    self._refuse(member, str(version or "another version"))
                continue
            has_state = bool(request["has_state"])
            self._state_exists |= has_state  # also if that worker has ended by now
            if member is None or member.is_leaving:
                logger.info("ignoring the request of a worker that is not in the job any more: %s", request["worker"])
                continue
            member.has_state |= has_state
            if "request" not in request:
                continue  # only the report that it has the state
            if member.request == str(request["request"]):
                continue  # sent twice, as happens when a worker's connection breaks
            member.request, member.phase = str(request["request"]), Phase.WAITING
            member.skips_sync = bool(request["skip_sync"])

    def _refuse(self, member: ElasticWorker, version: str) -> None:
        """Stop a worker of another version, which counts as failed."""
        member.stop()
        ending = (
            f"cannot take part: hvd_cluster is {version} there and {__version__} in the launcher; all hosts need the "
            "same Python environment"
        )
        self._record_failure(
            member, Outcome(member.display_rank, member.host, finished_at=time.time(), ending_text=ending)
        )

    def _reap(self) -> None:
        """Record the outcomes of workers that have ended."""
        for member in list(self._members.values()):
            member.kill_after_grace()
            outcome = member.outcome
            if outcome is None:
                continue
            del self._members[member.key]
            if member.is_leaving:
                continue
            if outcome.ok:
                self._finished.append(outcome)
                logger.info("rank %d has finished", outcome.rank)
                continue
            self._record_failure(member, outcome)
            if member in self._world:
                self._lost.append(outcome)
                # Workers that still try to connect in this world learn at once that it has ended.
                self._fleet.server.close_keys(f"world/{self._generation}.")

    def _record_failure(self, member: ElasticWorker, outcome: Outcome) -> None:
        self._failed.append(outcome)
        # The job may continue without this worker, and nothing else would show what it raised.
        text = f":\n{outcome.error.traceback_text.rstrip()}" if outcome.error else ""
        logger.warning("rank %d on host %s %s%s", outcome.rank, member.host, outcome.ending(), text)
        self.hosts.fail(member.host)
        if why := self._give_up_reason(outcome):
            logger.error("%s", why)
            self._fatal_outcome = outcome

    def _view(self, usable: Mapping[str, int], blacklisted: frozenset[str]) -> View:
        spec, now_s = self._spec, time.monotonic()
        workers = tuple(member.view() for member in self._members.values() if not member.is_leaving)
        is_ready = any(worker.rank is None and worker.phase is Phase.WAITING for worker in workers)
        self._ready_since_s = (self._ready_since_s or now_s) if is_ready else None
        is_broken = bool(self._lost) or any(w.rank is not None and w.phase is Phase.WAITING for w in workers)
        self._broken_since_s = (self._broken_since_s or now_s) if is_broken else None
        is_short = self._generation < 0 or is_broken
        self._short_since_s = (self._short_since_s or now_s) if is_short else None
        return View(
            hosts={host: slots for host, slots in usable.items() if host not in blacklisted},
            blacklisted=blacklisted,
            workers=workers,
            num_proc=spec.num_proc,
            min_num_proc=spec.min_num_proc,
            max_num_proc=spec.max_num_proc,
            generation=self._generation,
            size=len(self._world),
            state_exists=self._state_exists,
            num_lost=len(self._lost),
            is_finished=bool(self._finished),
            num_resets=self._num_resets,
            reset_limit=spec.reset_limit,
            ready_for_s=0.0 if self._ready_since_s is None else now_s - self._ready_since_s,
            broken_for_s=0.0 if self._broken_since_s is None else now_s - self._broken_since_s,
            short_for_s=0.0 if self._short_since_s is None else now_s - self._short_since_s,
            timeout_s=spec.elastic_timeout_s,
            leave_timeout_s=self._leave_timeout_s,
            may_come=spec.may_come,
            may_return=spec.may_return,
        )

    # --- what is to be done ------------------------------------------------------------------------------------------

    def _apply(self, decision: Decision, usable: Mapping[str, int]) -> None:
        for key in decision.stop:
            self._members[key].stop(shows_stack=True)
        for key in decision.leave:
            self._members[key].expect_exit()
            self._announcer.dismiss(self._members[key])
        if decision.world:
            self._make_world([self._members[key] for key in decision.world], decision.action)
        for host in decision.start:
            self._start(host, usable)
        living = [member for member in self._world if member.key in self._members]
        self._announcer.notify_change(living, *decision.notify)
        if decision.text:
            self._log_wait(decision.text)

    def _start(self, host: str, usable: Mapping[str, int]) -> None:
        key = next(self._keys)
        machine = self._fleet.host_key(host)
        slots = sum(count for name, count in usable.items() if self._fleet.host_key(name) == machine)
        here = {m.slot for m in self._members.values() if self._fleet.host_key(m.host) == machine}
        slot = next(number for number in itertools.count() if number not in here)
        labels = {member.display_rank for member in self._members.values()}
        label = next(number for number in itertools.count() if number not in labels)
        member = ElasticWorker(key, f"{self._job_id}.{key}", host, slot, label)
        local_size = max(slot + 1, min(slots, self._spec.max_num_proc or slots))  # all that may come share the cores

        def on_line(_rank: int, stream: str, line: str) -> None:
            self._callbacks.on_line(member.display_rank, stream, line)

        logger.info("starting a worker on %s", host)
        try:
            topology = Topology(
                rank=label,
                size=max(label + 1, local_size, self._spec.num_proc),
                local_rank=slot,
                local_size=local_size,
                host=host.rpartition("@")[2],
                rendezvous=self._fleet.rendezvous(host),
                secret=self._fleet.secret,
                job_id=self._job_id,
                worker=member.name,
                launcher="hvd_cluster",
            )
            self._members[key] = member
            member.worker = self._fleet.start(
                host,
                self._spec.task,
                topology,
                {"HOROVOD_ELASTIC": "1", "HOROVOD_ELASTIC_TIMEOUT": f"{self._spec.elastic_timeout_s:g}"},
                replace(self._callbacks, on_line=on_line),
            )
        except (OSError, LaunchError) as error:
            self._members.pop(key, None)
            if not self._members:  # no other worker would lose its work
                raise LaunchError(f"a worker cannot be started: {error}") from error
            ending = f"could not be started: {error}"
            self._record_failure(member, Outcome(label, host, finished_at=time.time(), ending_text=ending))

    def _make_world(self, members: list[ElasticWorker], action: Action) -> None:
        if self._generation >= 0:
            self._num_resets += 1
            self._fleet.server.close_keys(f"world/{self._generation}.")
        newcomers = sum(member.rank is None for member in members)
        lost = sum(member not in members for member in self._world)
        self._generation += 1
        self._announcer.begin_world()
        fleet = self._fleet
        slots = [
            Slot(i, fleet.host_key(m.host), m.host.rpartition("@")[2], fleet.gpus(m.name))
            for i, m in enumerate(members)
        ]
        placements = place_keeping_local_slots(slots, [member.slot for member in members])
        self._world = [members[placement.slot.index] for placement in placements]
        first = self._world[0].host
        for member, placement in zip(self._world, placements, strict=True):
            topology = fleet.topology(placement, member.host, first, self._job_id, self._generation)
            answer = {
                **{name: getattr(topology, name) for name in TOPOLOGY_FIELDS},
                "newcomers": newcomers,
                "lost": lost,
                "sync": not all(each.skips_sync for each in members),
            }
            answer["interface"] = fleet.interface(member.host)
            # A worker that already uses its GPU addresses it by its original index.
            answer["devices"] = ",".join(placement.visible_devices) if member.rank is None else ""
            member.rank, member.phase = placement.rank, Phase.RUNNING
            self._announcer.assign_rank(member, answer)
        self._lost.clear()
        self._short_since_s = self._ready_since_s = self._broken_since_s = None
        logger.info(
            "%s: generation %d has %d workers, %d of them new", action.value, self._generation, len(members), newcomers
        )

    def _log_wait(self, text: str) -> None:
        last, at_s = self._last_log
        now_s = time.monotonic()
        if text != last or now_s - at_s > _LOG_INTERVAL_S:
            self._last_log = (text, now_s)
            logger.log(logging.INFO if text != last else logging.WARNING, "waiting: %s", text)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _results(self) -> list[Outcome]:
        """The outcomes of the last world, or of all workers if there was none.

        Earlier failures do not count. A member that was lost with its host or by a signal does not invalidate what rank
        0 has finished; its own error does.
        """
        done = {outcome.rank for outcome in self._finished}
        # Before the first world, a worker that has finished may have replaced one that failed.
        failed = self._lost if self._generation >= 0 else [o for o in self._failed if o.rank not in done]
        wrong = [outcome for outcome in failed if 0 not in done or outcome.is_own_fault]
        for outcome in failed:
            if outcome not in wrong:
                logger.warning("rank %d %s; the job is done, as rank 0 has finished", outcome.rank, outcome.ending())
        return sorted([*self._finished, *wrong], key=lambda outcome: outcome.rank)

    def _give_up(self, decision: Decision) -> list[Outcome]:
        failed = first_failure(self._failed)
        # New workers that are still starting do not affect how the last world ended.
        is_lost = all(member.rank is None or member.is_leaving for member in self._members.values())
        if self._lost and is_lost:
            logger.error("%s", decision.text)
            return list(self._lost)
        if failed is not None and all(member.is_leaving for member in self._members.values()):
            logger.error("%s", decision.text)
            return list(self._failed)
        first = "" if failed is None else f"\n\nThe first worker that failed:\n\n{failure_text(failed, [failed])}"
        raise LaunchError(decision.text + first)
