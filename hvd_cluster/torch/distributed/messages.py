"""Messages from one rank of a group to another, numbered for each pair and tag.

Each is a broadcast in the set of the two.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.signature import Kind, Signature
from hvd_cluster.errors import HorovodInternalError
from hvd_cluster.torch.distributed.calls import OrderedCalls
from hvd_cluster.torch.distributed.tensors import Target, in_bytes, metas, source
from hvd_cluster.torch.distributed.work import HandleWork
from hvd_cluster.torch.distributed.world import set_of


class Messages:
    """What one rank of a group sends and receives.

    A message travels when both ends are there, as with Gloo. Messages of one pair and tag arrive in order.

    Args:
        ranks: the global ranks of the group, by rank in the group.
        rank: this process's rank in the group.
        label: names the group in messages; equal on all ranks.
        timeout: how long the other end may take.
    """

    def __init__(self, ranks: Sequence[int], rank: int, label: str, timeout: timedelta) -> None:
        self._ranks = ranks
        self._rank = rank
        self._label = label
        self.timeout_s = timeout.total_seconds()
        self._calls: dict[tuple[int, int, int], OrderedCalls] = {}
        #: Receives from any rank, by tag and number of bytes.
        self._from_any: dict[tuple[int, int], _AnySourceReceives] = {}
        self._is_closed = False

    def close(self) -> None:
        """Fail receives from any rank at the group's end; nothing awaits other messages."""
        self._is_closed = True
        for receives in self._from_any.values():
            receives.fail(HorovodInternalError(f"{self._label} was destroyed before the message came"))

    def _awaited_since(self) -> float:
        return math.inf if self._is_closed else 0.0

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> HandleWork:
        """Send to the group rank ``dst``."""
        return HandleWork(self._transfer(self._rank, dst, tag, source(tensor)), [tensor])

    def receive(self, tensor: torch.Tensor, src: int, tag: int) -> HandleWork:
        """Receive from the group rank ``src``."""
        target = Target(tensor)
        receives = self._from_any.get((tag, tensor.nbytes))
        if receives is not None:  # it may have what this call should get
            return receives.receive(_Receive(tensor, target, frozenset({src})))
        return HandleWork(self._transfer(src, self._rank, tag, target.flat, target), [tensor], lambda: src)

    def receive_from_any(self, tensor: torch.Tensor, tag: int) -> HandleWork:
        """Receive from whichever rank of the group sends first; CPU tensors only."""
        if not tensor.is_cpu:
            raise ValueError("recv(src=None) needs a tensor on the CPU")
        receives = self._from_any.setdefault((tag, tensor.nbytes), _AnySourceReceives(self, tag, tensor.nbytes))
        others = frozenset(range(len(self._ranks))) - {self._rank}
        return receives.receive(_Receive(tensor, Target(tensor), others))

    def receive_bytes(self, buffer: torch.Tensor, src: int, tag: int, awaited_since: Callable[[], float]) -> Handle:
        """Receive into a flat buffer; the timeout counts while a caller waits.

        Args:
            buffer: gets the message.
            src: the group rank that sends.
            tag: that of the message.
            awaited_since: that of the request.
        """
        return self._transfer(src, self._rank, tag, buffer, awaited_since=awaited_since)

    def _transfer(
        self,
        src: int,
        dst: int,
        tag: int,
        flat: torch.Tensor,
        target: Target | None = None,
        *,
        awaited_since: Callable[[], float] | None = None,
    ) -> Handle:
        for rank in (src, dst):
            if not 0 <= rank < len(self._ranks) or src == dst:
                raise ValueError(f"{self._label}: invalid source or destination: {src} to {dst}")
        calls = self._calls.get((src, dst, tag))
        if calls is None:
            ends = sorted((self._ranks[src], self._ranks[dst]))
            label = f"{self._label}: send {src} to {dst} tag {tag}"
            calls = self._calls[src, dst, tag] = OrderedCalls(set_of(ends), label, timedelta(0), is_pair=True)
        data = in_bytes([flat])
        return calls.submit(
            Signature(Kind.BROADCAST, metas(data), root=self._ranks[src]),
            data,
            data,
            finish=lambda _: None if target is None else target.finish(),
            timeout=timedelta(seconds=self.timeout_s),
            awaited_since=awaited_since or self._awaited_since,
        ).handle


@dataclass(eq=False)
class _Receive:
    """One receive from any of some ranks."""

    tensor: torch.Tensor
    target: Target
    sources: frozenset[int]
    handle: Handle = field(default_factory=lambda: Handle(running_engine().progress))
    source: int = -1
    since_s: float = field(default_factory=time.monotonic)

    def take(self, src: int, message: torch.Tensor) -> None:
        self.source = src
        in_bytes([self.target.flat])[0].copy_(message)
        self.target.finish()
        self.handle.succeed(None)


class _AnySourceReceives:
    """The receives of one tag and size after the first one from any rank.

    The engine matches a message with a receive from its very sender. So while a receive waits for any rank, a receive
    from each of them is under way; what the others have sent meanwhile is kept for later receives. Those that are still
    under way when no receive waits cannot be withdrawn, because their senders may know of them.
    """

    def __init__(self, messages: Messages, tag: int, num_bytes: int) -> None:
        self._messages = messages
        self._tag = tag
        self._num_bytes = num_bytes
        self._lock = threading.RLock()
        self._waiting: list[_Receive] = []
        self._under_way: set[int] = set()
        self._arrived: deque[tuple[int, torch.Tensor]] = deque()

    def receive(self, receive: _Receive) -> HandleWork:
        """Take a message that has arrived, or wait for one."""
        with self._lock:
            for number, (src, message) in enumerate(self._arrived):
                if src in receive.sources:
                    del self._arrived[number]
                    receive.take(src, message)
                    break
            else:
                self._waiting.append(receive)
                self._expect(receive.sources)
        return HandleWork(receive.handle, [receive.tensor], lambda: receive.source)

    def _expect(self, sources: Iterable[int]) -> None:
        for src in sorted(set(sources) - self._under_way):
            self._under_way.add(src)
            buffer = torch.empty(self._num_bytes, dtype=torch.uint8)
            handle = self._messages.receive_bytes(buffer, src, self._tag, partial(self._awaited_since, src))
            handle.on_settled(partial(self._settle, src, buffer, handle))

    def _awaited_since(self, src: int) -> float:
        """Since when a receive waits for a message of ``src``.

        The stall inspector calls this without the lock.
        """
        since_s = [receive.since_s for receive in list(self._waiting) if src in receive.sources]
        return min(since_s, default=math.inf)

    def _settle(self, src: int, message: torch.Tensor, handle: Handle) -> None:
        with self._lock:
            self._under_way.discard(src)
            try:
                if handle.error is not None:
                    raise handle.error
                receive = next((receive for receive in self._waiting if src in receive.sources), None)
                if receive is None:
                    self._arrived.append((src, message))
                else:
                    self._waiting.remove(receive)
                    receive.take(src, message)
                for waiting in list(self._waiting):
                    self._expect(waiting.sources)
            except (HorovodInternalError, RuntimeError) as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """All receives that wait fail."""
        with self._lock:
            for waiting in self._waiting:
                waiting.handle.fail(error)
            self._waiting.clear()
