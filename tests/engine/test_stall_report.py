"""The text of a stall warning."""

from __future__ import annotations

from hvd_cluster.engine.messages import StallLimit, StallQuery, StallReply, Wait, WaitState
from hvd_cluster.engine.stall_report import describe_stall

GRADIENT = Wait((0, "allreduce.gradient"))
LAUNCHED = Wait((0, "allreduce.loss"), 7)
HOSTS = ["a", "a", "b"]
SETS = {0: (0, 1, 2), 1: (0, 2)}


def describe(query: tuple[Wait, ...], *replies: StallReply, limit: StallLimit = StallLimit.CHECK) -> str:
    by_rank = {reply.rank: reply for reply in replies}
    return describe_stall(
        StallQuery(1, query, limit),
        {rank: by_rank.get(rank, StallReply(1, rank)) for rank in range(3)},
        HOSTS,
        SETS,
        60,
    )


def test_no_text_where_no_rank_keeps_others_waiting() -> None:
    assert describe((GRADIENT, LAUNCHED)) == ""


def test_each_missing_rank_with_its_stack_and_then_a_rank_that_waits() -> None:
    text = describe(
        (GRADIENT,),
        StallReply(1, 0, stack="train.py:8 in train: loss.backward()"),
        StallReply(
            1, 1, ((GRADIENT, WaitState.NOT_SUBMITTED),), "allreduce.x", 61.25, 812, "train.py:3 in f: g()\n    in g"
        ),
        StallReply(1, 2, silence="it is stopped (SIGSTOP or SIGTSTP)"),
    )
    assert text.splitlines()[1:] == [
        "Missing ranks:",
        "1: [allreduce.gradient] - rank 1 on a last submitted allreduce.x, 61.2 s ago; process 812 is at:",
        "    train.py:3 in f: g()",
        "        in g",
        "2: [allreduce.gradient] - rank 2 on b does not answer: it is stopped (SIGSTOP or SIGTSTP)",
        "Rank 0 waits at:",
        "    train.py:8 in train: loss.backward()",
    ]


def test_a_silent_rank_is_missing_only_where_it_takes_part() -> None:
    wait = Wait((1, "allreduce.part"))
    assert describe((wait,), StallReply(1, 1, silence="it is stopped")) == ""
    text = describe((wait,), StallReply(1, 2, silence="it is stopped"), limit=StallLimit.SHUTDOWN)
    assert "2!: [allreduce.part (process set 1)] - rank 2 on b does not answer: it is stopped" in text


def test_of_ranks_that_have_launched_work_those_with_a_busy_device_keep_the_others_waiting() -> None:
    text = describe(
        (LAUNCHED,),
        StallReply(1, 0, ((LAUNCHED, WaitState.NOT_COMPLETE),)),
        StallReply(1, 1, ((LAUNCHED, WaitState.NOT_REACHED),)),
        StallReply(1, 2, ((LAUNCHED, WaitState.NOT_COMPLETE),)),
    )
    assert "1: [allreduce.loss] - rank 1 on a has submitted nothing yet; its device is still busy with earlier" in text
    assert "rank 0" not in text
    assert "rank 2" not in text


def test_if_no_rank_completes_what_all_have_launched_the_network_is_named() -> None:
    replies = [StallReply(1, rank, ((LAUNCHED, WaitState.NOT_COMPLETE),)) for rank in range(3)]
    assert describe((LAUNCHED,), *replies).endswith("NCCL_DEBUG=INFO shows which network NCCL uses.")
    assert "NCCL_DEBUG" not in describe((LAUNCHED,), *replies[:2])
