"""The policy is pure: each test shows it one moment of a job."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hvd_cluster.launch.elastic.policy import READY_WAIT_S, Action, Decision, Phase, View, WorkerView, decide

S, W, R = Phase.STARTING, Phase.WAITING, Phase.RUNNING


def view(
    workers: list[tuple[str, Phase, int | None]], hosts: dict[str, int], have_state: tuple[int, ...] = (), **more: Any
) -> View:
    numbers: dict[str, Any] = {"num_proc": 2, "min_num_proc": 2, **more}
    return View(
        hosts=hosts,
        workers=tuple(
            WorkerView(key, host, phase, rank, key in have_state) for key, (host, phase, rank) in enumerate(workers)
        ),
        **{"state_exists": bool(have_state), **numbers},
    )


def test_workers_start_on_all_slots_but_no_more_than_wanted() -> None:
    assert decide(view([], {"a": 2, "b": 2})).start == ("a", "a", "b", "b")
    assert decide(view([], {"a": 2, "b": 2}, max_num_proc=3)).start == ("a", "a", "b")
    assert decide(view([("a", S, None)], {"a": 2, "b": 1}, max_num_proc=2)).start == ("a",)


def test_the_first_world_waits_for_those_that_are_starting_but_not_forever() -> None:
    workers = [("a", W, None), ("a", W, None), ("b", S, None)]
    hosts = {"a": 2, "b": 1}
    assert decide(view(workers, hosts)).action is Action.WAIT
    late = decide(view(workers, hosts, ready_for_s=READY_WAIT_S))
    assert (late.action, late.world) == (Action.START, (0, 1))
    assert decide(view([("a", W, None), ("a", S, None)], hosts, ready_for_s=99.0)).action is Action.WAIT


def test_a_world_that_trains_hears_of_new_workers_when_they_are_ready() -> None:
    members = [("a", R, 0), ("a", R, 1)]
    hosts = {"a": 2, "b": 2}
    began = decide(view(members, hosts, generation=0, size=2))
    assert (began.action, began.start) == (Action.WAIT, ("b", "b"))
    one = [*members, ("b", W, None), ("b", S, None)]
    assert decide(view(one, hosts, generation=0, size=2)).action is Action.WAIT
    both = [*members, ("b", W, None), ("b", W, None)]
    assert decide(view(both, hosts, generation=0, size=2)).notify == (True, False)


def test_members_of_hosts_that_are_gone_are_to_leave() -> None:
    members = [("a", R, 0), ("b", R, 1)]
    assert decide(view(members, {"a": 1}, generation=0, size=2)).notify == (False, True)
    asked = [("a", W, 0), ("b", W, 1)]
    decision = decide(view(asked, {"a": 1}, generation=0, size=2, min_num_proc=1))
    assert (decision.action, decision.world, decision.leave) == (Action.RESIZE, (0,), (1,))


def test_a_broken_world_waits_until_all_members_have_left_it() -> None:
    decision = decide(view([("a", W, 0), ("b", R, 1)], {"a": 1, "b": 1}, generation=0, size=3, num_lost=1))
    assert (decision.action, decision.world) == (Action.WAIT, ())
    assert "ranks 1 to leave" in decision.text


def test_a_member_that_never_leaves_a_broken_world_is_stopped() -> None:
    workers = [("a", W, 0), ("b", R, 1)]
    hung = decide(view(workers, {"a": 1, "b": 1}, generation=0, size=3, num_lost=1, broken_for_s=8, leave_timeout_s=7))
    assert (hung.action, hung.stop) == (Action.WAIT, (1,))
    assert "HOROVOD_ELASTIC_LEAVE_TIMEOUT" in hung.text


def test_old_members_keep_the_low_ranks_and_the_state() -> None:
    workers = [("c", W, None), ("a", W, 2), ("b", W, 1)]
    decision = decide(view(workers, {"a": 1, "b": 1, "c": 1}, generation=4, size=3, num_lost=1))
    assert (decision.action, decision.world) == (Action.RESTART, (2, 1, 0))


def test_the_workers_of_a_failed_host_are_stopped() -> None:
    members = [("a", R, 0), ("b", R, 1), ("b", R, 2)]
    decision = decide(
        view(members, {"a": 1}, blacklisted=frozenset("b"), generation=0, size=4, num_lost=1, min_num_proc=1)
    )
    assert decision.stop == (1, 2)


def test_unless_the_state_would_go_with_them() -> None:
    left = view([("b", W, 1)], {}, blacklisted=frozenset("b"), generation=0, size=2, num_lost=1, min_num_proc=1)
    decision = decide(left)
    assert (decision.stop, decision.action, decision.world) == ((), Action.RESIZE, (0,))
    trains = view([("b", R, 0)], {}, blacklisted=frozenset("b"), generation=1, size=1, min_num_proc=1)
    assert decide(trains) == Decision(action=Action.WAIT)


def test_too_few_workers_wait_and_then_give_up() -> None:
    short = [("a", W, 0)]
    waiting = decide(view(short, {"a": 1}, generation=0, size=2, num_lost=1, short_for_s=5))
    assert (waiting.action, waiting.text) == (Action.WAIT, "2 workers needed, 1 ready, 1 slots usable")
    over = decide(view(short, {"a": 1}, generation=0, size=2, num_lost=1, short_for_s=601))
    assert over.action is Action.RAISE
    assert "Timed out waiting for minimum number of slots" in over.text
    assert "no host is excluded, after 600 s" in over.text
    excluded = replace(view(short, {"a": 1}, generation=0, size=2, num_lost=1, short_for_s=601), blacklisted={"b"})
    assert "b is excluded after a failure (cooldown_range, or hvdrun's" in decide(excluded).text
    assert "b is excluded, after 600 s" in decide(replace(excluded, may_return=True)).text


def test_workers_that_start_on_slots_that_suffice_get_a_minute() -> None:
    starting = {"hosts": {"a": 2}, "generation": -1, "timeout_s": 2.0}
    workers = [("a", W, None), ("a", S, None)]
    assert decide(view(workers, **starting, short_for_s=59)).action is Action.WAIT
    late = decide(view(workers, **starting, short_for_s=61))
    assert late.action is Action.RAISE
    assert "after 60 s" in late.text
    # Where slots are missing nobody starts, and the timeout holds.
    assert decide(view(workers, **starting | {"hosts": {"a": 1}}, short_for_s=3)).action is Action.RAISE


def test_a_job_whose_hosts_all_failed_for_good_ends_at_once() -> None:
    gone: dict[str, Any] = {"blacklisted": frozenset("ab")}
    assert decide(view([], {}, **gone)).action is Action.RAISE
    assert decide(view([], {}, may_return=True, **gone)).action is Action.WAIT
    assert decide(view([], {"c": 1}, **gone)).action is Action.WAIT
    assert decide(view([], {"c": 1}, may_come=False, **gone)).action is Action.RAISE


def test_a_state_that_no_one_holds_any_more_is_lost() -> None:
    decision = decide(view([("a", W, None), ("a", W, None)], {"a": 2}, generation=3, size=2, num_lost=2))
    assert decision.action is Action.RAISE
    assert "unable to broadcast state" in decision.text


def test_a_member_that_has_not_received_the_state_cannot_replace_those_that_had_it() -> None:
    alone: dict[str, Any] = {"generation": 1, "size": 2, "num_lost": 1, "min_num_proc": 1, "state_exists": True}
    still_in_its_world = decide(view([("b", R, 1)], {"b": 1}, **alone))
    assert (still_in_its_world.action, still_in_its_world.world) == (Action.WAIT, ())
    # Its report may be on its way, so it is not stopped, although another worker on its host has failed.
    on_failed_host = decide(view([("b", R, 1)], {}, blacklisted=frozenset("b"), **alone))
    assert (on_failed_host.action, on_failed_host.stop) == (Action.WAIT, ())
    with_another = decide(view([("b", R, 1), ("c", R, 2)], {"c": 1}, blacklisted=frozenset("b"), **alone))
    assert (with_another.action, with_another.stop) == (Action.WAIT, ())
    lost = decide(view([("b", W, 1)], {"b": 1}, **alone))
    assert lost.action is Action.RAISE
    assert "all workers that held the state of the job have ended" in lost.text
    received = decide(view([("b", W, 1)], {"b": 1}, (0,), **alone))
    assert (received.action, received.world) == (Action.RESIZE, (0,))


def test_workers_start_again_if_none_has_received_a_state_yet() -> None:
    decision = decide(view([("a", W, 1), ("b", W, None)], {"a": 1, "b": 1}, generation=0, size=2, num_lost=1))
    assert (decision.action, decision.world) == (Action.RESTART, (0, 1))


def test_a_worker_with_the_state_comes_before_members_without_it() -> None:
    workers = [("a", W, 0), ("b", W, 2), ("c", W, None)]
    hosts = {"a": 1, "b": 1, "c": 1}
    assert decide(view(workers, hosts, (1,), generation=2, size=3, num_lost=1)).world == (1, 0, 2)
    few = decide(view(workers, hosts, (1,), generation=2, size=3, num_lost=1, max_num_proc=2))
    assert (few.world, few.leave, few.stop) == ((1, 0), (), (2,))


def test_a_worker_on_a_failed_host_stays_until_others_have_received_the_state() -> None:
    members = [("a", R, 0), ("b", R, 1)]
    failed: dict[str, Any] = {"blacklisted": frozenset("a"), "generation": 1, "size": 2, "min_num_proc": 1}
    assert decide(view(members, {"b": 1}, (0,), **failed)).stop == ()
    assert decide(view(members, {"b": 1}, (0, 1), **failed)).stop == (0,)
    # Its host has not failed but is to be given back: it is asked to leave when the other one has the state.
    given_back = {**failed, "blacklisted": frozenset()}
    assert decide(view(members, {"b": 1}, (0,), **given_back)).notify == (False, False)
    assert decide(view(members, {"b": 1}, (0, 1), **given_back)).notify == (False, True)


def test_the_last_worker_with_the_state_joins_one_more_world_after_its_host_was_given_back() -> None:
    broken: dict[str, Any] = {"generation": 1, "size": 3, "num_lost": 1, "min_num_proc": 1}
    decision = decide(view([("a", W, 0), ("c", W, 1)], {"c": 1}, (0,), **broken))
    assert (decision.action, decision.world, decision.leave) == (Action.RESIZE, (0, 1), ())
    joined: dict[str, Any] = {"generation": 2, "size": 2, "min_num_proc": 1}
    assert decide(view([("a", R, 0), ("c", R, 1)], {"c": 1}, (0, 1), **joined)).notify == (False, True)
    # One of the holders' hosts has failed, the other was given back.
    mixed = decide(view([("a", W, 0), ("b", W, 1)], {"c": 1}, (0, 1), **broken, blacklisted=frozenset("b")))
    assert (mixed.action, mixed.world, mixed.stop) == (Action.RESIZE, (0, 1), ())


def test_all_hosts_may_be_replaced_at_once() -> None:
    members, new = [("a", R, 0), ("b", R, 1)], [("c", W, None), ("d", W, None)]
    hosts = {"c": 1, "d": 1}
    trains: dict[str, Any] = {"generation": 0, "size": 2}
    began = decide(view(members, hosts, (0, 1), **trains))
    assert (began.action, began.start, began.stop) == (Action.WAIT, ("c", "d"), ())
    assert decide(view(members + new, hosts, (0, 1), **trains)).notify == (True, False)
    left = [("a", W, 0), ("b", W, 1)]
    assert decide(view(left + new, hosts, (0, 1), **trains)).world == (0, 1, 2, 3)
    # Where there is no room for all, a holder makes room for a worker that can receive the state.
    full = decide(view(members, hosts, (0, 1), **trains, max_num_proc=2))
    assert (full.start, full.stop, full.notify) == (("c",), (), (False, True))
    replaced = decide(view(left + new[:1], hosts, (0, 1), **trains, max_num_proc=2))
    assert (replaced.world, replaced.leave) == ((0, 2), (1,))
    # A discovery that finds no host for a moment changes nothing.
    assert decide(view(members, {}, (0, 1), **trains, max_num_proc=2)) == Decision(action=Action.WAIT)


@pytest.mark.parametrize(("num_resets", "action"), [(1, Action.RESTART), (2, Action.RAISE)])
def test_resets_are_counted(num_resets: int, action: Action) -> None:
    workers = [("a", W, 0), ("a", W, None)]
    decision = decide(view(workers, {"a": 2}, generation=2, size=2, num_lost=1, num_resets=num_resets, reset_limit=2))
    assert decision.action is action


def test_no_worker_is_started_that_could_not_join_any_more() -> None:
    members = [("a", R, 0), ("a", R, 1)]
    assert decide(view(members, {"a": 4}, generation=1, size=2, num_resets=0, reset_limit=0)).start == ()


def test_a_finished_job_starts_nothing_and_sends_home_who_waits() -> None:
    workers = [("a", R, 1), ("a", W, 2), ("b", S, None)]
    decision = decide(view(workers, {"a": 2, "b": 4}, generation=0, size=3, is_finished=True))
    assert (decision.start, decision.leave, decision.stop, decision.world) == ((), (1,), (2,), ())


@pytest.mark.long
def test_any_sequence_of_losses_and_changes_keeps_the_rules() -> None:
    """A simulation: whatever happens, worlds are no larger than allowed, no smaller, and begin with a holder."""
    for seed in range(200):
        _simulate(random.Random(seed))


def _simulate(chance: random.Random) -> None:
    hosts = {"a": 2, "b": 1, "c": 3}
    least, most = 2, 4
    workers: dict[int, WorkerView] = {}
    generation, size, lost, keys = -1, 0, 0, iter(range(10_000))
    blacklisted: set[str] = set()
    state_exists = False
    for _ in range(60):
        usable = {host: slots for host, slots in hosts.items() if host not in blacklisted}
        decision = decide(
            View(
                hosts=usable,
                blacklisted=frozenset(blacklisted),
                workers=tuple(workers.values()),
                num_proc=2,
                min_num_proc=least,
                max_num_proc=most,
                generation=generation,
                size=size,
                state_exists=state_exists,
                num_lost=lost,
                ready_for_s=chance.choice((0.0, READY_WAIT_S)),
                may_return=True,
            )
        )
        if decision.action is Action.RAISE:
            holders = [worker for worker in workers.values() if worker.has_state or not state_exists]
            assert all(worker.rank is None for worker in holders)
            return
        assert not set(decision.stop) & set(decision.world)
        assert not set(decision.leave) & set(decision.world)
        for key in {*decision.stop, *decision.leave}:
            gone = workers.pop(key)
            assert (
                gone.rank is None
                or gone.host in blacklisted
                or gone.host not in usable
                or decision.world
                or (Counter(w.host for w in workers.values())[gone.host] >= usable[gone.host])
            )
        if decision.world:
            assert least <= len(decision.world) <= most
            assert generation < 0 or workers[decision.world[0]].rank is not None
            assert workers[decision.world[0]].has_state or not state_exists
            old = [(not w.has_state, w.rank) for key in decision.world if (w := workers[key]).rank is not None]
            assert old == sorted(old)
            for worker in workers.values():
                assert worker.rank is None or worker.key in decision.world
            for rank, key in enumerate(decision.world):
                workers[key] = replace(workers[key], phase=R, rank=rank)
            generation, size, lost = generation + 1, len(decision.world), 0
        for host in decision.start:
            key = next(keys)
            workers[key] = WorkerView(key, host, S)
        assert len(workers) <= most + sum(w.host in blacklisted or w.host not in usable for w in workers.values())
        if decision.notify != (False, False):
            workers = {k: replace(w, phase=W if w.phase is R else w.phase) for k, w in workers.items()}
        for key, worker in list(workers.items()):
            fate = chance.random()
            if fate < 0.03:
                del workers[key]
                blacklisted.add(worker.host)
                lost += worker.rank is not None
            elif worker.phase is S or (worker.phase is R and lost):
                workers[key] = replace(worker, phase=W)
            elif worker.phase is R and chance.random() < 0.5:  # all members of its world are there
                workers[key], state_exists = replace(worker, has_state=True), True
        if chance.random() < 0.2:
            blacklisted.clear()
        if chance.random() < 0.1:
            hosts = {host: slots for host, slots in {"a": 2, "b": 1, "c": 3, "d": 2}.items() if chance.random() < 0.8}
