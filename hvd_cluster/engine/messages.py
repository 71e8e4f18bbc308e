"""The messages between ranks, up and down the tree, and the entries of the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hvd_cluster.engine.signature import Key, Signature
from hvd_cluster.engine.timeline.recorder import Record
from hvd_cluster.monitor.rank_report import RankReport


@dataclass(frozen=True)
class RankSignature:
    """The signature that one rank has submitted for a request."""

    rank: int
    signature: Signature


@dataclass(frozen=True)
class Report:
    """Up: each member of the sender's subtree has submitted this request or joined."""

    key: Key
    #: One signature, or two that differ.
    signatures: tuple[RankSignature, ...]
    #: Some member of the subtree has joined and would send zeros.
    joined: bool = False


@dataclass(frozen=True)
class CachedReport:
    """Up: the same, for a request in the log, if all agree with its definition."""

    id: int
    #: A rank that has submitted it, for error messages.
    rank: int
    joined: bool = False


@dataclass(frozen=True)
class Joined:
    """Up: a rank of the subtree has joined; its earlier requests were reported."""

    rank: int


@dataclass(frozen=True)
class Leaving:
    """Up: a rank of the sender's subtree shuts down in good order."""

    rank: int


@dataclass(frozen=True)
class ReportBatch:
    """Up: one message of a negotiator to the parent's."""

    #: How many log messages the sender had applied.
    num_applied: int
    items: tuple[Report | CachedReport | Joined | Leaving, ...]


@dataclass(frozen=True)
class Define:
    """Log: this id stands for this request from here on."""

    id: int
    key: Key
    signature: Signature


@dataclass(frozen=True)
class Forget:
    """Log: do not use this id for new reports."""

    id: int


@dataclass(frozen=True)
class Run:
    """Log: execute these requests now, as one bucket."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Refuse:
    """Log: fail this request on every rank that has submitted it, and continue."""

    key: Key
    text: str
    #: The ranks asked for different things; otherwise a rank has joined, and the operation does not allow that.
    is_disagreement: bool = True


@dataclass(frozen=True)
class Tune:
    """Log: use these parameters from here on."""

    #: The largest size of a bucket.
    fusion_threshold_bytes: int
    #: How long requests wait to be fused with others.
    cycle_time_ms: float


@dataclass(frozen=True)
class JoinDone:
    """Log: all ranks have joined; no rank is joined any more."""

    last_rank: int


@dataclass(frozen=True)
class Close:
    """Log: the world ends here, in good order; everything before is still executed."""

    rank: int


Entry = Define | Forget | Run | Refuse | Tune | JoinDone | Close


@dataclass(frozen=True)
class VotesComplete:
    """Log of one host: its ranks concerned voted for these; its leader reports them."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Recall:
    """Log of one host: vote again for the requests you voted for in an older epoch."""

    epoch: int


#: What the ranks of one host read: the world's log, mixed with messages for this host only.
HostMessage = tuple[Entry, ...] | VotesComplete | Recall


@dataclass(frozen=True)
class Bucket:
    """Execute together: the keys and signatures of one :class:`Run`."""

    requests: tuple[tuple[Key, Signature], ...]


#: What :meth:`Negotiator.apply` returns for the engine to do, in this order.
Decision = Bucket | Refuse | Tune | JoinDone | Close


@dataclass(frozen=True)
class LogMessage:
    """Down: the next entries of the log."""

    entries: tuple[Entry, ...]

    @property
    def is_end(self) -> bool:
        """The world ends in these entries."""
        return any(isinstance(entry, Close) for entry in self.entries)


@dataclass(frozen=True)
class TimelineSwitch:
    """Down: start the timeline at ``path`` on rank 0, or stop it (None)."""

    path: str | None
    mark_cycles: bool = False


@dataclass(frozen=True)
class TimelineEvents:
    """Up: events for the timeline."""

    #: How many timelines had been started when they were recorded.
    number: int
    records: list[Record]


@dataclass(frozen=True)
class Abort:
    """Up and down: the world is broken."""

    reason: str


@dataclass(frozen=True)
class Goodbye:
    """Up and down: the sender has finished everything and closes the connection."""


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: that other ranks submit a request, or that it completes."""

    key: Key
    #: The position of its bucket in the log, once it is launched; 0 before.
    bucket: int = 0
    #: The decisions that the waiting rank has executed: this one is not among them.
    position: int = field(default=0, compare=False)


class WaitState(Enum):
    """Why a rank keeps others waiting."""

    NOT_SUBMITTED = "has not submitted it"
    NOT_LAUNCHED = "it has not begun this operation"
    NOT_REACHED = "its device is still busy with earlier work"
    NOT_COMPLETE = "it has not completed this operation"


class StallLimit(Enum):
    """What happens if a rank still keeps others waiting when all have replied."""

    #: Rank 0 logs a warning.
    CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
    #: The job ends.
    SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    #: The job ends, unless the device of a rank is busy with other work.
    TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"


@dataclass(frozen=True)
class StallReport:
    """Up: one rank has waited too long."""

    waits: tuple[Wait, ...]
    limit: StallLimit


@dataclass(frozen=True)
class StallQuery:
    """Down: do you keep others waiting, and what are you doing?"""

    number: int
    waits: tuple[Wait, ...]
    limit: StallLimit


@dataclass(frozen=True)
class StallReply:
    """Up: the reply of a rank, or of its host's leader if the rank does not reply."""

    number: int
    rank: int
    #: How this rank keeps others waiting.
    states: tuple[tuple[Wait, WaitState], ...] = ()
    #: What the rank has submitted last, "" for nothing, and how many seconds ago.
    last_name: str = ""
    last_age_s: float = 0.0
    pid: int = 0
    #: Where its user's code is; see :func:`~hvd_cluster.monitor.stacks.user_stack`.
    stack: str = ""
    #: Why the rank does not reply.
    silence: str = ""
    #: In the middle of which operation it waits in shared memory, and for which ranks; "" if it does not.
    waits: str = ""


StallMessage = StallReport | StallQuery | StallReply


@dataclass(frozen=True)
class StepReport:
    """Up: the recent steps of one rank."""

    report: RankReport


@dataclass(frozen=True)
class Awaited:
    """Down: other hosts wait for what this subtree has not reported."""


#: What ranks that are linked in the tree send to each other.
Message = (
    ReportBatch | LogMessage | TimelineSwitch | TimelineEvents | Abort | Goodbye | StallMessage | StepReport | Awaited
)
