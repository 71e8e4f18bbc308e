"""From tensors to requests of the engine, for every framework.

The tensors of TensorFlow and MXNet arrive here as torch tensors over the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from hvd_cluster.engine import current
from hvd_cluster.engine.fusion import split_into_requests
from hvd_cluster.engine.membership import next_number, process_set_id, require_process_set, running_engine
from hvd_cluster.engine.process_sets import ProcessSet
from hvd_cluster.engine.request import REDUCED_DTYPES, Handle, Request, describe, dtype_name, recorded_event
from hvd_cluster.engine.signature import Kind, ReduceOp, Signature
from hvd_cluster.errors import HorovodInternalError, UnsupportedReductionError

Tensors = list[torch.Tensor]

#: Element types that can be moved, but not all of them reduced.
_MOVED_DTYPES = REDUCED_DTYPES | {torch.uint16, torch.uint32, torch.uint64}

# To take a member from an Enum class costs as much as a call in Python 3.11.
_AVERAGE, _ADASUM = ReduceOp.AVERAGE, ReduceOp.ADASUM


class _Rules(NamedTuple):
    """What a kind of collective takes."""

    dtypes: frozenset[torch.dtype]
    reduces: bool = False
    has_root: bool = False
    #: Tensors need a first dimension.
    has_rows: bool = False
    #: Ranks may differ in the first dimension.
    is_ragged: bool = False


_RULES = {
    Kind.ALLREDUCE: _Rules(REDUCED_DTYPES, reduces=True),
    Kind.ALLGATHER: _Rules(_MOVED_DTYPES, has_rows=True, is_ragged=True),
    Kind.BROADCAST: _Rules(_MOVED_DTYPES, has_root=True),
    Kind.ALLTOALL: _Rules(_MOVED_DTYPES, has_rows=True, is_ragged=True),
    Kind.REDUCESCATTER: _Rules(REDUCED_DTYPES, reduces=True, has_rows=True),
    Kind.BARRIER: _Rules(_MOVED_DTYPES),
}


def reduce_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    """The reduction that two arguments ask for; warns the public function's caller.

    Raises:
        ValueError: both arguments are given.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return _AVERAGE
    return op if type(op) is ReduceOp else ReduceOp(op)  # an Enum takes long to find itself


def scatter_op(op: ReduceOp) -> ReduceOp:
    """The reduction of a reducescatter.

    Raises:
        UnsupportedReductionError: ``op`` is neither Average nor Sum.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        name = ReduceOp(op).name
        raise UnsupportedReductionError(f"reducescatter supports op=hvd.Average and op=hvd.Sum, not {name}")
    return ReduceOp(op)


class Waitable(Protocol):
    """A handle."""

    def wait(self) -> Any:
        """The results; raises the error if the operation failed."""


@dataclass(frozen=True)
class Present:
    """Which tensors of a list this rank has; other ranks may have those it lacks."""

    #: Bytes of each tensor of the list, equal on all ranks.
    num_bytes: tuple[int, ...]
    #: The indices of those that this rank has.
    indices: tuple[int, ...]
    #: A number that is equal on all ranks if they have the same ones.
    fingerprint: int


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective without tensors; what worlds may change is looked up at each call."""

    kind: Kind
    process_set: ProcessSet
    #: Matches the request with those of the other ranks; None takes the next number.
    name: str | None = None
    op: ReduceOp = ReduceOp.SUM
    #: Global rank that a broadcast starts from.
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    #: The tensors are some of a list; None if they are all of it.
    present: Present | None = None
    #: As in a :class:`Signature`.
    sparse_shapes: tuple[tuple[int, ...], ...] = ()

    def named(self, name: str | None) -> Collective:
        """The same under another name."""
        return replace(self, name=name)

    def begin(
        self, tensors: Sequence[torch.Tensor], is_waited_for: bool = True, *, splits: tuple[int, ...] = ()
    ) -> Handle:
        """:func:`submit` with these options; the handle gives the list of results."""
        return submit(
            self.kind,
            tensors,
            process_set=self.process_set,
            name=self.name,
            op=self.op,
            root=self.root,
            prescale=self.prescale,
            postscale=self.postscale,
            identity=-1 if self.present is None else self.present.fingerprint,
            sparse_shapes=self.sparse_shapes,
            splits=splits,
            is_waited_for=is_waited_for,
        )

    def begin_parts(
        self, tensors: Sequence[torch.Tensor], is_waited_for: bool = True, *, groups: Sequence[Sequence[int]] = ()
    ) -> Waitable:
        """Submit tensors as few requests of bounded size.

        With :attr:`present`, all ranks make the same number of requests, whichever tensors they have, so that each of
        these fails on every rank if they have different ones.

        Args:
            tensors: contiguous.
            is_waited_for: as for :func:`submit`.
            groups: indices of tensors that must share a request; with :attr:`present` in the whole list.
        """
        if self.present is None:
            plan = split_into_requests([tensor.numel() * tensor.element_size() for tensor in tensors], groups)
        else:
            place = {index: number for number, index in enumerate(self.present.indices)}
            whole = split_into_requests(self.present.num_bytes, groups)
            plan = [[place[index] for index in part if index in place] for part in whole]
        base = self.name
        if base is None and len(plan) > 1:
            # What this rank alone refuses must take no number.
            _check(self.kind, tensors, self.process_set, None, self.op, self.root, self.prescale, self.postscale)
            base = f"parts.{next_number(self.process_set, f'{self.kind.value}.parts')}"
        handles = [
            self.named(base if len(plan) == 1 else f"{base}.{number}").begin(
                [tensors[index] for index in part] or [torch.zeros(1, device="cpu")], is_waited_for
            )
            for number, part in enumerate(plan)
        ]
        return CombinedHandles(handles, plan)


def submit(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    *,
    process_set: ProcessSet,
    name: str | None = None,
    unnamed: str = "noname",
    op: ReduceOp = ReduceOp.SUM,
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wire: torch.dtype | None = None,
    identity: int = -1,
    sparse_shapes: tuple[tuple[int, ...], ...] = (),
    splits: tuple[int, ...] = (),
    in_place: bool = False,
    prepare: Callable[[Sequence[torch.Tensor]], Tensors] = list,
    finish: Callable[[Tensors], Any] = lambda results: results,
    is_waited_for: bool = False,
    labels: Sequence[str] = (),
) -> Handle:
    """Hand tensors of any framework to the engine.

    Args:
        kind: the collective.
        tensors: one, or those of a group; dense and contiguous, on one device.
        process_set: whose ranks take part.
        name: matches the request with those of the other ranks; None takes the next number of ``unnamed``.
        unnamed: the family in which operations without a name are numbered.
        op: the reduction.
        root: the global rank that a broadcast starts from.
        prescale: factor before the reduction.
        postscale: factor after it.
        wire: element type in which floating-point tensors travel and are added; allreduce only.
        identity: a number that identifies the tensors of a group if their shapes and types do not.
        sparse_shapes: the shapes of the sparse tensors of which ``tensors`` are the entries.
        splits: rows for each rank; alltoall only.
        in_place: write the results into ``tensors``.
        prepare: checks ``tensors`` and returns those to send, over the same memory.
        finish: makes the value of the handle from the results.
        is_waited_for: this thread waits for the handle next; otherwise the request waits for others to be sent with.
        labels: the timeline's names of the tensors, if not the request's name.

    Raises:
        ValueError: the tensors, the root or the process set do not fit, or a request of this name is pending.
        NotImplementedError: Adasum with these ranks or tensors.
        HorovodInternalError: the world has ended, ``init()`` was not called, or a tensor has no dimension to gather
            or scatter.
    """
    engine = running_engine()
    set_id = process_set_id(process_set)
    data = prepare(tensors)
    rules = _check(kind, data, process_set, name, op, root, prescale, postscale)
    metas = tuple([describe(tensor, any_first_dimension=rules.is_ragged) for tensor in data])
    wire_name = "" if wire is None else dtype_name(wire)
    handle = Handle(engine.progress)
    request = Request(
        kind + "." + (unnamed if name is None else name),  # an f-string takes the name of a member
        set_id,
        Signature(kind, metas, op, root, float(prescale), float(postscale), (), wire_name, identity, sparse_shapes),
        data,
        data if in_place else [],
        finish,
        handle,
        splits,
        ready_event=recorded_event(data),
        labels=labels,
        is_unnamed=name is None,
    )
    return engine.submit(request, is_waited_for=is_waited_for)


def _check(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    name: str | None,
    op: ReduceOp,
    root: int,
    prescale: float,
    postscale: float,
) -> _Rules:
    rules = _RULES[kind]
    if rules.has_rows and any(tensor.dim() == 0 for tensor in tensors):
        label = "" if name is None else f" (tensor {name!r})"
        raise HorovodInternalError(f"Rank {current.rank()} tried to {kind.name} a rank-zero tensor.{label}")
    for tensor in tensors:
        if tensor.dtype not in rules.dtypes:
            raise ValueError(f"Tensor type {tensor.dtype} is not supported.")
    if rules.has_root:
        check_root(root, process_set)
    if rules.reduces:
        check_reduction(tensors, op, prescale, postscale, process_set)
    return rules


def wait_all(handles: Iterable[Waitable]) -> list[Any]:
    """Wait for all handles, and return their values.

    It also waits after one has failed, because tensors are in use until then.

    Raises:
        HorovodInternalError: the first error.
    """
    values: list[Any] = []
    failure: Exception | None = None
    for handle in handles:
        try:
            values.append(handle.wait())
        except HorovodInternalError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return values


class CombinedHandles:
    """The handles of requests that were submitted together, as one.

    Args:
        handles: of the requests.
        plan: the index of each of their results; empty for a request without any.
    """

    def __init__(self, handles: Sequence[Waitable], plan: Sequence[Sequence[int]]) -> None:
        self._handles = handles
        self._plan = plan

    def wait(self) -> Tensors:
        """All results."""
        parts = zip(self._plan, wait_all(self._handles), strict=True)
        placed = {index: result for part, results in parts if part for index, result in zip(part, results, strict=True)}
        return [placed[index] for index in range(len(placed))]


class IntegerHandle:
    """Gives another handle's integer, or 0 for None, as an int32 tensor of shape ()."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> Tensors:
        """The number, in a list."""
        return [torch.tensor(self._handle.wait() or 0, dtype=torch.int32)]


def finished(value: Any) -> Handle:
    """The handle of an operation that had nothing to do."""
    handle = Handle()
    handle.succeed(value)
    return handle


def check_reduction(
    tensors: Sequence[torch.Tensor], op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet
) -> None:
    """Check a reduction before anything is submitted.

    Raises:
        ValueError: bool tensors cannot be averaged or scaled.
        NotImplementedError: as for :func:`check_adasum`, or Adasum of integers.
    """
    is_scaled = op == _AVERAGE or prescale != 1.0 or postscale != 1.0
    if is_scaled:
        for tensor in tensors:
            if getattr(tensor, "dtype", None) is torch.bool:
                raise ValueError(
                    "bool tensors cannot be averaged or scaled: use op=hvd.Sum (any), hvd.Min (all) or hvd.Max"
                )
    if op == _ADASUM:
        check_adasum(process_set)
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise NotImplementedError("Adasum needs floating-point tensors")


def check_root(root: int, process_set: ProcessSet) -> None:
    """Check that the root of a broadcast takes part.

    Raises:
        ValueError: ``root`` is not in ``process_set``.
    """
    require_process_set(process_set)
    ranks = process_set.ranks
    if ranks is not None and root not in ranks:
        shown = ranks if len(ranks) <= 8 else [*ranks[:4], "...", ranks[-1]]
        raise ValueError(
            f"root_rank={root} is not among the ranks that take part, {shown}; this is rank {current.rank()}"
        )


def check_adasum(process_set: ProcessSet) -> None:
    """Check that Adasum can pair ranks; before ``init()``, only the process set.

    Raises:
        NotImplementedError: the number of ranks is not a power of two, or ``process_set`` is not the global one.
    """
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support process sets other than the global one")
    if current.is_initialized() and (size := current.topology().size) & (size - 1):
        raise NotImplementedError(
            f"Adasum combines ranks pairwise, so their number has to be a power of two; it is {size}"
        )
