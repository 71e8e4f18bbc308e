"""The text of a stall warning, from the replies of all ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from hvd_cluster.engine.messages import StallLimit, StallQuery, StallReply, WaitState
from hvd_cluster.engine.request import Key

#: How many names are listed for each rank.
_MAX_NAMES = 6
#: Horovod's text.
_MISSING_TEXT = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
    "waiting for remainder of ranks for more than {:g} seconds. This may indicate that "
    "different ranks are trying to submit different tensors or that only subset of ranks is submitting "
    "tensors, which will cause deadlock. \nMissing ranks:"
)
_DEVICE_TEXT = "One or more operations were launched on devices and have not completed for more than {:g} seconds."
_NETWORK_TEXT = (
    "All ranks have launched them and no device is busy with other work, so the communication itself hangs. "
    "NCCL_DEBUG=INFO shows which network NCCL uses."
)
_BUSY = frozenset({WaitState.NOT_LAUNCHED, WaitState.NOT_REACHED})


def describe_stall(
    query: StallQuery,
    replies: Mapping[int, StallReply],
    hosts: Sequence[str],
    process_sets: Mapping[int, tuple[int, ...]],
    limit_s: float,
) -> str:
    """Which ranks keep others waiting, and where in their programs they are; "" if no rank does.

    Args:
        query: what was asked.
        replies: one for each rank.
        hosts: for each rank, its host.
        process_sets: the ranks of each process set.
        limit_s: how long the waits have lasted at least.
    """
    report = _Report(query, replies, hosts, process_sets)
    parts = []
    missing = report.paragraphs(frozenset({WaitState.NOT_SUBMITTED}), is_on_device=False)
    if missing:
        parts += [_MISSING_TEXT.format(limit_s), *missing]
    late = report.paragraphs(_BUSY, is_on_device=True)
    hanging = late or report.paragraphs(frozenset({WaitState.NOT_COMPLETE}), is_on_device=True)
    if hanging:
        parts += [_DEVICE_TEXT.format(limit_s), *hanging]
        if not late and len(hanging) == len(report.members):
            parts.append(_NETWORK_TEXT)
    if parts:
        parts += report.waiting()
    return "\n".join(parts)


def is_any_device_busy(replies: Iterable[StallReply]) -> bool:
    """The device of some rank still has to do other work first."""
    return any(state in _BUSY for reply in replies for _, state in reply.states)


def names(keys: Iterable[Key]) -> str:
    """A list of operations, with the process sets that are not the global one."""
    texts = [name if process_set_id == 0 else f"{name} (process set {process_set_id})" for process_set_id, name in keys]
    return "[" + ", ".join(texts[:_MAX_NAMES]) + (", ..." if len(texts) > _MAX_NAMES else "") + "]"


def indented(stack: str) -> str:
    """The stack of a rank below a line of the warning."""
    return textwrap.indent(stack or "(no Python code)", "    ")


class _Report:
    """The arguments of :func:`describe_stall`."""

    def __init__(
        self,
        query: StallQuery,
        replies: Mapping[int, StallReply],
        hosts: Sequence[str],
        process_sets: Mapping[int, tuple[int, ...]],
    ) -> None:
        self._query = query
        self._replies = replies
        self._hosts = hosts
        self._process_sets = process_sets
        #: The ranks that take part in what is waited for.
        self.members = {rank for wait in query.waits for rank in process_sets.get(wait.key[0], ())}

    def paragraphs(self, states: frozenset[WaitState], *, is_on_device: bool) -> list[str]:
        """One for each rank in any of ``states``, or that does not reply."""
        texts = []
        mark = "!" if self._query.limit == StallLimit.SHUTDOWN else ""
        for rank, host in enumerate(self._hosts):
            reply = self._replies[rank]
            found = {wait.key: state for wait, state in reply.states if state in states}
            if reply.silence:
                found = {
                    wait.key: WaitState.NOT_SUBMITTED
                    for wait in self._query.waits
                    if bool(wait.bucket) == is_on_device and rank in self._process_sets.get(wait.key[0], ())
                }
            if not found:
                continue
            text = f"{rank}{mark}: {names(found)} - rank {rank} on {host} "
            if reply.silence:
                texts.append(f"{text}does not answer: {reply.silence}")
                continue
            if reply.last_name:
                text += f"last submitted {reply.last_name}, {reply.last_age_s:.1f} s ago"
            else:
                text += "has submitted nothing yet"
            if is_on_device:
                text += f"; {next(iter(found.values())).value}"
            texts.append(f"{text}; process {reply.pid} is at:\n{indented(reply.stack)}")
        return texts

    def waiting(self) -> list[str]:
        """Where one of the ranks is that wait for the others."""
        for rank, reply in sorted(self._replies.items()):
            if rank in self.members and not reply.states and not reply.silence:
                return [f"Rank {rank} waits at:\n{indented(reply.stack)}"]
        return []
