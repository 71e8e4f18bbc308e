"""The ordered calls of one process group, as requests of the engine.

torch matches the calls of a group by their order, the engine matches requests by name. So each call gets a name that
all ranks compute alike: what it does, and a number if several calls that do the same may be in flight. The n-th call of
a kind on one rank then meets the n-th on the others. A training step repeats its calls, so after the first step every
name has an id, and a vote in shared memory is all that a call costs (:mod:`hvd_cluster.engine.shared_memory.ballot`).
Calls made by the continuation of another call are named after it (:mod:`~.futures`). Their names are always new, so
each of them costs a message up and down the tree.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.request import Handle, Request, recorded_event
from hvd_cluster.engine.signature import SetId, Signature
from hvd_cluster.errors import WorldEndedError
from hvd_cluster.torch.distributed.futures import CallName, running_continuation

#: How many equal calls may be negotiated at once; further ones wait for an earlier one. Only with small tensors it pays
#: to negotiate several at once, and each takes an id.
_NUM_NAMES, _MAX_BYTES = 4, 1 << 16
#: Different calls of a group that are remembered. All ranks forget them at the same call.
_MAX_SERIES = 1000
#: torch's options contain this if the caller has set no timeout.
_UNSET_S = -0.001


class Call(NamedTuple):
    """A call in progress."""

    handle: Handle
    #: What it does, and which of those that do the same it is; both are equal on all ranks.
    what: str
    number: int
    group: OrderedCalls

    @property
    def name(self) -> CallName | None:
        """Equal on all ranks; None for messages between two ranks."""
        return self.group.name_of(f"{self.what} #{self.number}")


@dataclass
class _Series:
    """The calls of a group with equal signatures."""

    #: What the calls do.
    what: str
    num_names: int
    count: int = 0


class OrderedCalls:
    """Submits the calls of one group, or those of one rank to another.

    Args:
        set_id: whose ranks take part.
        label: names the group in messages; equal on all ranks.
        timeout: how long the other ranks may take to make a call too.
        is_pair: these are messages between two ranks, whose calls differ: one sends, the other receives. Continuations
            do not name them.
    """

    def __init__(self, set_id: SetId, label: str, timeout: timedelta, *, is_pair: bool = False) -> None:
        self._set_id = set_id
        self._label = label
        self.timeout_s = timeout.total_seconds()
        self._is_pair = is_pair
        self._num_calls = 0
        engine = running_engine()
        self._num_joins = engine.num_joins
        self._engine = weakref.ref(engine)
        self._series: dict[Signature, _Series] = {}

    def submit(
        self,
        signature: Signature,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        *,
        splits: tuple[int, ...] = (),
        output_splits: tuple[int, ...] = (),
        finish: Callable[[list[torch.Tensor]], Any] = lambda _: None,
        timeout: timedelta | None = None,
        is_waited_for: bool = False,
        awaited_since: Callable[[], float] | None = None,
    ) -> Call:
        """Submit one call.

        Args:
            signature: what is equal on all ranks.
            inputs: contiguous tensors to send.
            outputs: contiguous tensors for the results.
            splits: elements for each rank, of an alltoall.
            output_splits: elements from each rank.
            finish: called with the outputs, by the thread that executes the call.
            timeout: overrides that of the group, if it is set.
            is_waited_for: the caller waits for the handle next.
            awaited_since: that of the request.

        Raises:
            HorovodInternalError: the world has ended.
        """
        timeout_s = self.timeout_s
        if timeout is not None and timeout.total_seconds() != _UNSET_S:
            timeout_s = timeout.total_seconds()
        engine = running_engine()
        if engine is not self._engine():
            raise WorldEndedError(
                f"the world of {self._label} has ended, and this process is in another one now: call "
                "destroy_process_group(), and make the groups again"
            )
        if engine.num_joins != self._num_joins:  # ranks that had joined do not know of calls that were refused
            self._num_joins, self._num_calls = engine.num_joins, 0
            self._series.clear()
        handle = Handle(engine.progress)
        name, what, number, labels = self._next(signature)
        request = Request(
            name,
            self._set_id,
            signature._replace(needs_all_ranks=True),
            inputs,
            outputs,
            finish,
            handle,
            splits,
            ready_event=recorded_event(inputs or outputs),
            labels=labels,
            output_splits=output_splits,
            is_ordered=True,
            timeout_s=timeout_s if timeout_s > 0 else math.inf,
            awaited_since=awaited_since,
        )
        return Call(engine.submit(request, is_waited_for=is_waited_for), what, number, self)

    def name_of(self, call: str) -> CallName | None:
        """The name that continuations of a call get, or None if they get none."""
        return None if self._is_pair else CallName(call, self._label, self._set_id)

    def _next(self, signature: Signature) -> tuple[str, str, int, Sequence[str]]:
        """A signature's next call: name, what it does, number, and timeline tracks."""
        continuation = None if self._is_pair else running_continuation()
        if continuation is not None:
            described = _described(signature)
            what = f"{described} in {continuation.name.above(self._set_id)}"
            number = continuation.next_number(self._label + what)
            name = f"{self._label}: {what}{f' #{number}' if number else ''}"
            return name, what, number, [f"{self._label}: {described}"] * len(signature.tensors)
        series = self._series_of(signature)
        series.count += 1
        name = f"{self._label}: {series.what}"
        if series.num_names > 1:
            name += f" #{series.count % series.num_names}"
        self._num_calls += 1
        return name, series.what, self._num_calls, ()

    def _series_of(self, signature: Signature) -> _Series:
        series = self._series.get(signature)
        if series is None:
            if len(self._series) >= _MAX_SERIES:
                self._series.clear()
            is_small = all(-1 not in meta.shape for meta in signature.tensors) and signature.num_bytes <= _MAX_BYTES
            series = _Series(_described(signature), _NUM_NAMES if is_small else 1)
            self._series[signature] = series
        return series


def _described(signature: Signature) -> str:
    """A name for calls with this signature, unlike those of other signatures.

    Only those of sparse tensors may share one. The op and the shape of these are not in the name, so that ranks that
    differ in them get an error.
    """
    tensors = ", ".join(f"{meta.dtype}{list(meta.shape)}" for meta in signature.tensors)
    details: Sequence[str] = [
        *([signature.op.name.lower()] if signature.kind.value in ("allreduce", "reducescatter") else []),
        *([f"root {signature.root}"] if signature.root >= 0 else []),
        *({meta.device for meta in signature.tensors if meta.device != "cpu"}),
    ]
    return " ".join(part for part in (signature.kind.value, tensors, *details) if part)
