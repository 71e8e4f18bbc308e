"""Decides what an elastic job does next. Pure.

Hosts and workers in, a decision out.

The rules:

- A worker's slot must be on a usable host: one that discovery lists and that is not blacklisted. Other workers leave.
- Workers on a blacklisted host are stopped.
- New workers start first; workers that train are notified only when the new ones are ready to join.
- A world is broken when a member has ended or has left it. Then all other members leave it too, and a new world is
  formed from them and the new workers that are ready. Workers that have the state come first, so rank 0 has it.
- A worker has the state of the job when it has reported that. A member that joined with the present world may not have
  received it yet. When no worker has it any more, the job ends.
- If no worker that has the state is on a usable host, those that have it stay until others have received it.
- With fewer than ``min_num_proc`` workers the job waits, up to a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

#: Seconds for which a worker that is ready waits for others that are still starting.
READY_WAIT_S = 10.0
#: Seconds that workers get to start if there are enough slots, even if the timeout for too few workers is shorter: a
#: busy machine may take long to import torch.
START_S = 60.0
_COOLDOWN_TEXT = "cooldown_range, or hvdrun's --blacklist-cooldown-range, lets them come back"


class Phase(Enum):
    """The state of a living worker."""

    STARTING = "starting"
    #: It has requested a rank.
    WAITING = "waiting"
    #: It is a member of the present world.
    RUNNING = "running"


class Action(Enum):
    """The kind of a decision, for logs and tests."""

    WAIT = "wait"
    NOTIFY = "notify"
    START = "start"
    RESTART = "restart"
    RESIZE = "resize"
    RAISE = "raise"


@dataclass(frozen=True)
class WorkerView:
    """A living worker that was not asked to leave."""

    key: int
    host: str
    phase: Phase
    #: Its rank in the present world, or in the last one that it was in; None if it was never in one.
    rank: int | None = None
    #: It has reported that it has the state of the job.
    has_state: bool = False


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything that a decision depends on."""

    #: Usable hosts and their slots; hosts that have been in use longest come first.
    hosts: Mapping[str, int]
    #: Hosts that are excluded because they failed.
    blacklisted: frozenset[str] = frozenset()
    workers: tuple[WorkerView, ...]
    num_proc: int
    min_num_proc: int
    max_num_proc: int | None = None
    #: Number of the present world; -1 before the first.
    generation: int = -1
    #: Members of the present world when it was formed.
    size: int = 0
    #: A worker, which may have ended by now, has reported that it has the state of the job.
    state_exists: bool = False
    #: Members that have ended without finishing.
    num_lost: int = 0
    #: A member has finished the job.
    is_finished: bool = False
    num_resets: int = 0
    reset_limit: int | None = None
    #: How long the first of the ready new workers has waited, in seconds.
    ready_for_s: float = 0.0
    #: How long the present world has been broken, in seconds.
    broken_for_s: float = 0.0
    #: How long the job has had too few workers, in seconds.
    short_for_s: float = 0.0
    timeout_s: float = 600.0
    #: Seconds that a member gets to notice that its world is broken; one that hangs would block all others.
    leave_timeout_s: float = 300.0
    #: New hosts may become available.
    may_come: bool = True
    #: Blacklisted hosts may be used again.
    may_return: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now."""

    action: Action
    #: Hosts on which to start a worker, one for each entry.
    start: tuple[str, ...] = ()
    #: Workers to stop.
    stop: tuple[int, ...] = ()
    #: Workers that requested a rank and must exit instead.
    leave: tuple[int, ...] = ()
    #: The members of a new world, in the order of their ranks.
    world: tuple[int, ...] = ()
    #: Whether to notify the members that workers will be (added, removed).
    notify: tuple[bool, bool] = (False, False)
    #: What the job waits for, or why it ends.
    text: str = ""


def decide(view: View) -> Decision:
    """The next decision; see the rules at the top of this file."""
    members = [worker for worker in view.workers if worker.rank is not None]
    # Until a worker has reported the state, each member may be about to.
    holders = [worker for worker in view.workers if worker.has_state] if view.state_exists else members
    if view.is_finished:
        left = tuple(worker.key for worker in view.workers if worker.phase is Phase.WAITING)
        # Before the first world there is nothing to join: programs that never call init() just finish.
        new = [worker.key for worker in view.workers if worker.phase is Phase.STARTING]
        return Decision(action=Action.WAIT, leave=left, stop=tuple(new) if view.generation >= 0 else ())
    last = _last_holders(view, holders, members)
    if view.generation >= 0 and not holders and not last:
        return Decision(
            action=Action.RAISE,
            text="No hosts from previous set remaining, unable to broadcast state: all workers that held the state of "
            "the job have ended. Start it again from your last checkpoint.",
        )
    wanted, unwanted = _wanted_and_unwanted(view, last)
    stop = _to_stop(view, unwanted)
    leave = tuple(w.key for w in unwanted if w.phase is Phase.WAITING and w.key not in stop)
    base = Decision(action=Action.WAIT, start=_to_start(view, wanted), stop=stop, leave=leave)
    if view.generation < 0:
        return _first_world(view, wanted, base)
    if view.num_lost > 0 or any(worker.phase is Phase.WAITING for worker in members):
        return _next_world(view, wanted, members, base)
    return _intact(view, wanted, unwanted, base)


def _last_holders(view: View, holders: list[WorkerView], members: list[WorkerView]) -> list[WorkerView]:
    """The workers with which the state would be lost.

    Empty if one that has it is on a usable host.
    """
    if any(view.hosts.get(worker.host) for worker in holders):
        return []
    # The report of a member that has not left its world may be on its way.
    return holders or [worker for worker in members if worker.phase is not Phase.WAITING]


def _wanted_and_unwanted(view: View, last: list[WorkerView]) -> tuple[list[WorkerView], list[WorkerView]]:
    """The workers that may stay, and those that must leave.

    Those with the state stay first, then those with low ranks.

    Args:
        last: these may stay on any host, at least one of them, but leave room for a worker that can receive the state.
    """
    taken: Counter[str] = Counter()
    wanted: list[WorkerView] = []
    unwanted: list[WorkerView] = []
    room = len(view.workers) + 1 if view.max_num_proc is None else view.max_num_proc
    for worker in sorted(view.workers, key=_seniority):
        taken[worker.host] += 1
        stays = worker in last and len(wanted) < max(1, room - bool(view.hosts))
        fits = len(wanted) < room and (stays or taken[worker.host] <= view.hosts.get(worker.host, 0))
        (wanted if fits else unwanted).append(worker)
    return wanted, unwanted


def _seniority(worker: WorkerView) -> tuple[bool, bool, int, int]:
    return not worker.has_state, worker.rank is None, worker.rank or 0, worker.key


def _to_stop(view: View, unwanted: list[WorkerView]) -> tuple[int, ...]:
    """Workers that may not even finish their step.

    They are those on failed hosts, and new ones that are not needed.
    """
    return tuple(w.key for w in unwanted if w.host in view.blacklisted or w.rank is None)


def _to_start(view: View, wanted: list[WorkerView]) -> tuple[str, ...]:
    if _resets_are_used_up(view):
        return ()
    taken = Counter(worker.host for worker in wanted)
    free = [host for host, slots in view.hosts.items() for _ in range(slots - taken[host])]
    room = len(free) if view.max_num_proc is None else max(0, view.max_num_proc - len(wanted))
    return tuple(free[:room])


def _resets_are_used_up(view: View) -> bool:
    return view.generation >= 0 and view.reset_limit is not None and view.num_resets >= view.reset_limit


def _first_world(view: View, wanted: list[WorkerView], base: Decision) -> Decision:
    ready = [worker for worker in wanted if worker.phase is Phase.WAITING]
    others_come = bool(base.start) or (len(ready) < len(wanted) and view.ready_for_s < READY_WAIT_S)
    if len(ready) >= view.num_proc and not others_come:
        return replace(base, action=Action.START, world=tuple(w.key for w in ready))
    return _short(view, len(ready), view.num_proc, base)


def _next_world(view: View, wanted: list[WorkerView], members: list[WorkerView], base: Decision) -> Decision:
    """Wait until all members have left the broken world.

    Then at least one that has the state is wanted.
    """
    waiting = replace(base, leave=())
    going = [worker for worker in members if worker.key in base.stop]
    training = [worker for worker in members if worker.phase is not Phase.WAITING and worker not in going]
    if training:
        # They notice at their next collective. Workers that are not wanted leave then.
        ranks = ", ".join(str(worker.rank) for worker in training)
        if view.broken_for_s > view.leave_timeout_s and len(training) < len(members):
            hung = tuple(worker.key for worker in training)
            text = (
                f"for ranks {ranks} to end, which hang: they have not left their world within "
                f"{view.leave_timeout_s:g} s (HOROVOD_ELASTIC_LEAVE_TIMEOUT)"
            )
            return replace(waiting, stop=(*base.stop, *hung), text=text)
        return replace(waiting, text=f"for ranks {ranks} to leave their world")
    if going:
        return replace(waiting, text="for workers of failed hosts to end")
    if _resets_are_used_up(view):
        return Decision(
            action=Action.RAISE,
            stop=base.stop,
            text="Horovod was shutdown because number of resets during elastic job exceeded limit: "
            f"{view.reset_limit}. (--reset-limit says how often the workers may change.)",
        )
    ready = [worker for worker in wanted if worker.phase is Phase.WAITING]
    if len(ready) < view.min_num_proc:
        return _short(view, len(ready), view.min_num_proc, waiting)
    world = tuple(worker.key for worker in sorted(ready, key=_seniority))
    kind = Action.RESTART if len(world) == view.size else Action.RESIZE
    return replace(base, action=kind, world=world)


def _short(view: View, num_ready: int, needed: int, base: Decision) -> Decision:
    """Wait for more workers, with a time limit, or fail if none can come.

    There are too few.
    """
    slots = sum(view.hosts.values())
    are_starting = slots >= needed and any(worker.phase is Phase.STARTING for worker in view.workers)
    timeout_s = max(view.timeout_s, START_S) if are_starting else view.timeout_s
    if view.short_for_s > timeout_s:
        excluded = f"{_names(view.blacklisted)} excluded"
        if view.blacklisted and not view.may_return:
            excluded += f" after a failure ({_COOLDOWN_TEXT})"
        return Decision(
            action=Action.RAISE,
            stop=base.stop,
            text="Timed out waiting for minimum number of slots to become available. Please check that you have enough "
            f"resources to run at least {needed} Horovod processes. ({num_ready} workers are ready, {slots} slots are "
            f"usable, {excluded}, after {timeout_s:g} s; elastic_timeout, or hvdrun's --elastic-timeout, sets how long "
            "to wait.)",
        )
    no_more = bool(view.blacklisted) and not view.may_return and not (view.may_come and view.hosts)
    if no_more and slots < needed and not view.workers:
        return Decision(
            action=Action.RAISE,
            stop=base.stop,
            text=f"{needed} workers are needed, {slots} slots are usable, and {_names(view.blacklisted)} excluded "
            f"permanently after a failure: {_COOLDOWN_TEXT}.",
        )
    text = f"{needed} workers needed, {num_ready} ready, {slots} slots usable"
    return replace(base, text=text)


def _names(hosts: frozenset[str]) -> str:
    return f"{', '.join(sorted(hosts))} {'is' if len(hosts) == 1 else 'are'}" if hosts else "no host is"


def _intact(view: View, wanted: list[WorkerView], unwanted: list[WorkerView], base: Decision) -> Decision:
    """The world is training: decide whether its members should leave it for a change."""
    ready = [w for w in wanted if w.rank is None and w.phase is Phase.WAITING]
    others_come = bool(base.start) or any(w.phase is Phase.STARTING for w in wanted)
    adds = bool(ready) and (not others_come or view.ready_for_s >= READY_WAIT_S) and not _resets_are_used_up(view)
    removes = any(w.rank is not None and w.key not in base.stop for w in unwanted)
    action = Action.NOTIFY if adds or removes else Action.WAIT
    return replace(base, action=action, notify=(adds, removes))
