"""What negotiators say to each other: reports on their way up the tree, entries of the log on their way down."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_cluster.engine.signature import Key, Signature


@dataclass(frozen=True)
class RankSignature:
    """One rank's word for what a request looks like."""

    rank: int
    signature: Signature


@dataclass(frozen=True)
class Report:
    """ReportBatch: every member of the sender's subtree has submitted this request, or has joined."""

    key: Key
    #: One witness, or two whose signatures differ.
    signatures: tuple[RankSignature, ...]
    #: Some member of the subtree has joined and would send zeros.
    joined: bool = False


@dataclass(frozen=True)
class CachedReport:
    """ReportBatch: the same, for a request that the log has defined, when all agree with the definition."""

    id: int
    #: A rank that can vouch for it, for error messages.
    rank: int
    joined: bool = False


@dataclass(frozen=True)
class Joined:
    """ReportBatch: a rank of the sender's subtree has joined; what it had submitted before was reported before."""

    rank: int


@dataclass(frozen=True)
class Leaving:
    """ReportBatch: a rank of the sender's subtree shuts down in good order."""

    rank: int


@dataclass(frozen=True)
class ReportBatch:
    """One message to the parent."""

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
    """Log: carry out these requests now, as one bucket."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Refuse:
    """Log: fail this request on every rank that submitted it, and go on."""

    key: Key
    text: str
    #: The ranks asked for different things; else a rank has joined, and the operation does not allow that.
    is_disagreement: bool = True


@dataclass(frozen=True)
class Tune:
    """Log: use these from here on."""

    #: Most bytes of one bucket.
    fusion_threshold_bytes: int
    #: Milliseconds that requests wait for company.
    cycle_time_ms: float


@dataclass(frozen=True)
class JoinDone:
    """Log: all ranks have joined; nobody is joined any more."""

    last_rank: int


@dataclass(frozen=True)
class Close:
    """Log: the world ends here, in good order; what stands before is still carried out."""

    rank: int


Entry = Define | Forget | Run | Refuse | Tune | JoinDone | Close


@dataclass(frozen=True)
class Ready:
    """Log of one host: all of its ranks that these requests concern have voted for them; its leader reports them."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class Recall:
    """Log of one host: vote anew for what was voted for in an older epoch."""

    epoch: int


#: What the ranks of one host read: the world's log, and in between what concerns their host alone.
HostMessage = tuple[Entry, ...] | Ready | Recall


@dataclass(frozen=True)
class Bucket:
    """Carry out together: the keys and signatures of one :class:`Run`."""

    requests: tuple[tuple[Key, Signature], ...]


#: What :meth:`Negotiator.apply` tells the engine to do, in this order.
Decision = Bucket | Refuse | Tune | JoinDone | Close
