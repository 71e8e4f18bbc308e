"""From torch tensors to requests of the engine: what every collective of TensorFlow and of MXNet submits.

Their tensors reach this file as torch tensors over the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hvd_cluster.engine import basics
from hvd_cluster.engine.engine import Engine
from hvd_cluster.engine.grouping import split_into_requests
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.request import (
    OPEN_KINDS,
    REDUCED_DTYPES,
    Handle,
    Kind,
    ReduceOp,
    Request,
    Signature,
    describe,
    recorded_event,
)
from hvd_cluster.engine.submission_queue import SerialNumber
from hvd_cluster.engine.untraced import keep_untraced
from hvd_cluster.errors import HorovodInternalError, NotInitializedError

Tensors = list[torch.Tensor]

#: The last error of a collective that a callback of a compiled step has raised.
_kept: list[HorovodInternalError] = []

_REDUCING_KINDS = frozenset({Kind.ALLREDUCE, Kind.REDUCESCATTER})
#: These are only moved.
_MOVED_DTYPES = REDUCED_DTYPES | {torch.uint16, torch.uint32, torch.uint64}
_ROWED_KINDS = frozenset({Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER})


def reduce_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that two arguments of a public function ask for; warns the caller of that function.

    Raises:
        ValueError: both arguments are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    return ReduceOp.AVERAGE if op is None else ReduceOp(op)


class Waitable(Protocol):
    """What was begun and gives tensors."""

    def wait(self) -> Tensors:
        """The results; raises the error of what failed."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What to do, but for the tensors. Everything that may differ in a new world is looked up at each call."""

    kind: Kind
    process_set: ProcessSet
    #: What the ranks are matched by; None takes the next number of this kind of operation.
    name: str | None = None
    op: ReduceOp = ReduceOp.SUM
    #: Global rank that a broadcast starts from.
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0

    def named(self, name: str | None) -> Collective:
        """The same under another name."""
        return replace(self, name=name)

    def begin(
        self, tensors: Sequence[torch.Tensor], is_waited_for: bool = True, *, splits: tuple[int, ...] = ()
    ) -> Handle:
        """Submit; the handle gives the list of results.

        Args:
            tensors: one, or those of a group; contiguous.
            is_waited_for: this thread waits for the handle next; else it waits for company first.
            splits: rows for each rank; alltoall only.

        Raises:
            ValueError: a request of this name is under way, this rank is not in the process set, or the root is not.
            HorovodInternalError: the world has ended, or ``init()`` has not been called.
        """
        engine = running_engine()
        set_id = process_set_id(self.process_set)
        kind = self.kind
        self.check(tensors)
        metas = tuple([describe(tensor, any_first_dimension=kind in OPEN_KINDS) for tensor in tensors])
        handle = Handle(engine.progress)
        request = Request(
            f"{kind.value}.{'noname' if self.name is None else self.name}",
            set_id,
            Signature(kind, metas, self.op, self.root, float(self.prescale), float(self.postscale)),
            list(tensors),
            [],
            _unchanged,
            handle,
            splits,
            ready_event=recorded_event(tensors),
            is_unnamed=self.name is None,
        )
        return engine.submit(request, is_waited_for=is_waited_for)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse what cannot be submitted.

        Raises:
            ValueError: an element type, the root, or a combination of arguments is not supported.
            HorovodInternalError: a tensor has no dimension to gather or scatter.
        """
        kind = self.kind
        if kind in _ROWED_KINDS and any(tensor.dim() == 0 for tensor in tensors):
            rank = basics.rank()
            raise HorovodInternalError(f"Rank {rank} tried to {kind.name} a rank-zero tensor. ({self.name})")
        supported = REDUCED_DTYPES if kind in _REDUCING_KINDS else _MOVED_DTYPES
        wrong = [tensor.dtype for tensor in tensors if tensor.dtype not in supported]
        if wrong:
            raise ValueError(f"Tensor type {wrong[0]} is not supported.")
        if kind is Kind.BROADCAST:
            check_root(self.root, self.process_set)
        if kind in _REDUCING_KINDS:
            check_reduction(tensors, self.op, self.prescale, self.postscale, self.process_set)

    def begin_parts(
        self, tensors: Sequence[torch.Tensor], is_waited_for: bool = True, *, groups: Sequence[Sequence[int]] = ()
    ) -> Waitable:
        """Submit tensors that need not all be carried out together, as few requests of bounded size.

        Args:
            tensors: contiguous.
            is_waited_for: as for :meth:`begin`.
            groups: indices of tensors that are carried out together all the same.
        """
        plan = split_into_requests([tensor.numel() * tensor.element_size() for tensor in tensors], groups)
        base = self.name
        if base is None and len(plan) > 1:
            self.check(tensors)  # what this rank alone refuses must take no number
            base = f"parts.{next_number(self.process_set, f'{self.kind.value}.parts')}"
        handles = [
            self.named(base if len(plan) == 1 else f"{base}.{number}").begin(
                [tensors[index] for index in part], is_waited_for
            )
            for number, part in enumerate(plan)
        ]
        return CombinedHandles(handles, [index for part in plan for index in part])


class CombinedHandles:
    """Requests that were begun together.

    Args:
        handles: the requests.
        order: where each of their results, one after the other, belongs.
    """

    def __init__(self, handles: Sequence[Waitable], order: Sequence[int]) -> None:
        self._handles = handles
        self._order = order

    def wait(self) -> Tensors:
        """All results. Every request is waited for, also behind one that failed: its tensors are in use until then."""
        results: Tensors = []
        failure: Exception | None = None
        for handle in self._handles:
            try:
                results += handle.wait()
            except HorovodInternalError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        placed = dict(zip(self._order, results, strict=True))
        return [placed[index] for index in range(len(placed))]


class IntegerHandle:
    """The integer that a handle gives, or 0 where it gives nothing, as an int32 tensor of shape ()."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> Tensors:
        """The number, in a list."""
        return [torch.tensor(self._handle.wait() or 0, dtype=torch.int32)]


class FinishedHandle:
    """Results that were there at once."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def wait(self) -> Tensors:
        """The results."""
        return self._tensors


def check_reduction(
    tensors: Sequence[torch.Tensor], op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet
) -> None:
    """Refuse what has no meaning before anything is submitted.

    Raises:
        ValueError: bool tensors are to be averaged or scaled.
        NotImplementedError: :func:`check_adasum` says so, or a tensor is not of a floating-point type.
    """
    is_scaled = op == ReduceOp.AVERAGE or prescale != 1.0 or postscale != 1.0
    if is_scaled and torch.bool in [getattr(tensor, "dtype", None) for tensor in tensors]:
        raise ValueError("bool tensors cannot be averaged or scaled: use op=hvd.Sum (any), hvd.Min (all) or hvd.Max")
    if op == ReduceOp.ADASUM:
        check_adasum(process_set)
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise NotImplementedError("Adasum needs floating-point tensors")


def check_root(root: int, process_set: ProcessSet) -> None:
    """Refuse a broadcast from a rank that takes no part.

    Raises:
        ValueError: there is no such rank among those of ``process_set``.
    """
    _require_process_set(process_set)
    ranks = process_set.ranks
    if ranks is not None and root not in ranks:
        shown = ranks if len(ranks) <= 8 else [*ranks[:4], "...", ranks[-1]]
        raise ValueError(
            f"root_rank={root} is not among the ranks that take part, {shown}; this is rank {basics.rank()}"
        )


def check_adasum(process_set: ProcessSet) -> None:
    """Refuse Adasum where ranks cannot be combined pairwise; ``init()`` may be called later, and is then checked again.

    Raises:
        NotImplementedError: the number of ranks is no power of two, or ``process_set`` is not the global one.
    """
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support process sets other than the global one")
    if basics.is_initialized() and basics.size() & (basics.size() - 1):
        raise NotImplementedError(
            f"Adasum combines ranks pairwise, so their number has to be a power of two; it is {basics.size()}"
        )


def running_engine() -> Engine:
    """The engine; collectives report its absence as :class:`HorovodInternalError`, unlike ``rank()`` and its family."""
    keep_untraced()
    try:
        return basics.engine()
    except NotInitializedError as error:
        raise HorovodInternalError(str(error)) from None


@contextmanager
def keep_error() -> Iterator[None]:
    """Keep the error of a collective that is raised inside, for :func:`take_kept_error`.

    For what TensorFlow or JAX calls back from a compiled step: of an error their runtimes pass on the text only.
    """
    try:
        yield
    except HorovodInternalError as error:
        _kept[:] = [error.with_traceback(None)]
        raise


def take_kept_error() -> HorovodInternalError | None:
    """The error that a collective in a compiled step raised since this was last called, or None."""
    return _kept.pop() if _kept else None


def _require_process_set(process_set: object) -> None:
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r} is no hvd.ProcessSet: give one to hvd.init(process_sets=[...])")


def takes_part(process_set: ProcessSet) -> bool:
    """Whether this rank is in a process set; optimizers and tapes leave the gradients of a rank outside as they are."""
    _require_process_set(process_set)
    return process_set.included()


def process_set_id(process_set: ProcessSet) -> int:
    """The id of a registered process set."""
    _require_process_set(process_set)
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} does not exist or has not been registered")
    return process_set.process_set_id


def members(process_set: ProcessSet) -> tuple[int, ...]:
    """The global ranks that take part."""
    return running_engine().process_sets[process_set_id(process_set)]


def num_members(process_set: ProcessSet) -> int:
    """How many ranks take part."""
    return len(members(process_set))


def member_index(process_set: ProcessSet) -> int:
    """This rank's index among those that take part."""
    return members(process_set).index(running_engine().world.topology.rank)


def next_number(process_set: ProcessSet, family: str) -> SerialNumber:
    """The next number of unnamed operations of one family; the ranks are matched by it, so it counts alike on all."""
    return running_engine().next_number(process_set_id(process_set), family)


def rows_by_rank(tensor: torch.Tensor, given: Sequence[torch.Tensor], process_set: ProcessSet) -> tuple[int, ...]:
    """How many rows of ``tensor`` an alltoall sends to each rank.

    Args:
        tensor: shape (rows, ...).
        given: the user's splits, int32 of shape (ranks,), or nothing for equal ones.
        process_set: whose ranks take part.

    Raises:
        ValueError: the splits do not describe the tensor.
        HorovodInternalError: the tensor has no dimension.
    """
    num_ranks = num_members(process_set)
    if tensor.dim() == 0:
        raise HorovodInternalError(f"Rank {basics.rank()} tried to ALLTOALL a rank-zero tensor.")
    rows = tensor.shape[0]
    if not given:
        if rows % num_ranks:
            raise ValueError(
                f"the first dimension of the tensor, {rows}, cannot be split equally over {num_ranks} ranks"
            )
        return (rows // num_ranks,) * num_ranks
    (splits,) = given
    if splits.dim() != 1 or splits.dtype != torch.int32:
        raise ValueError(f"splits must be a 1-D int32 tensor, not {splits.dtype} of shape {tuple(splits.shape)}")
    counts = tuple(int(count) for count in splits.tolist())
    if len(counts) != num_ranks or min(counts) < 0:
        raise ValueError(f"splits must hold the rows for each of the {num_ranks} ranks, and holds {counts}")
    if sum(counts) > rows:
        raise ValueError(f"splits send {sum(counts)} rows, but the tensor has {rows}")
    return counts


def _unchanged(results: Tensors) -> Tensors:
    return results
