"""The text of a stall warning, from the replies of all ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from hvd_cluster.engine.messages import StallLimit, StallQuery, StallReply, WaitState
from hvd_cluster.engine.signature import Key, SetId, ranks_of
from hvd_cluster.engine.tree import TreePosition

#: How many names are listed for each rank.
_MAX_NAMES = 6
#: Horovod's text.
_MISSING_TEXT = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
    "waiting for remainder of ranks for more than {:g} seconds. This may indicate that "
    "different ranks are trying to submit different tensors or that only subset of ranks is submitting "
    "tensors, which will cause deadlock. \nMissing ranks:"
)
_INCOMPLETE_TEXT = "One or more operations have begun and do not complete. Ranks:"
_NETWORK_TEXT = (
    "All ranks have begun them and no device is busy with other work, so the communication itself hangs: look at the "
    "network between these hosts. On GPUs, NCCL_DEBUG=INFO shows which network NCCL uses."
)
_BUSY = frozenset({WaitState.NOT_LAUNCHED, WaitState.NOT_REACHED})


def describe_stall(
    query: StallQuery,
    replies: Mapping[int, StallReply],
    hosts: Sequence[str],
    process_sets: Mapping[int, tuple[int, ...]],
    warning_s: float,
) -> str:
    """Which ranks keep others waiting, and where in their programs; "" if none does.

    Args:
        query: what was asked.
        replies: one for each rank.
        hosts: for each rank, its host.
        process_sets: the ranks of each process set.
        warning_s: how long ranks have waited at least for others to submit something.
    """
    report = _Report(query, replies, hosts, process_sets)
    parts = []
    missing = report.paragraphs(frozenset({WaitState.NOT_SUBMITTED}), has_begun=False)
    if missing:
        parts += [_MISSING_TEXT.format(warning_s), *missing.values()]
    late = report.paragraphs(_BUSY, has_begun=True)
    hanging = late or report.paragraphs(frozenset({WaitState.NOT_COMPLETE}), has_begun=True)
    if hanging:
        parts += [_INCOMPLETE_TEXT, *hanging.values()]
        if not late and hanging.keys() == report.members:
            parts.append(_NETWORK_TEXT)
    # Where one of the other ranks waits.
    for rank in sorted(report.members - missing.keys() - hanging.keys()):
        if parts and replies[rank].stack:
            parts.append(f"Rank {rank} waits at:\n{indented(replies[rank].stack)}")
            break
    return "\n".join(parts)


def shutdown_text(shutdown_s: float) -> str:
    """The end of the ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`` message, as in Horovod."""
    return f'\nOne or more rank (marked by "!") is stalled for longer than {shutdown_s:g} seconds. Will shutdown.'


def is_any_device_busy(replies: Iterable[StallReply]) -> bool:
    """The device of some rank still has to do other work first."""
    return any(state in _BUSY for reply in replies for _, state in reply.states)


def silent_leader(rank: int, replies: Mapping[int, StallReply], positions: Sequence[TreePosition]) -> int | None:
    """The silent rank next to the root that passes on messages of ``rank``, or None."""
    above, silent = positions[rank].parent, None
    while above is not None:
        if above not in replies or replies[above].silence:
            silent = above
        above = positions[above].parent
    return silent


def names(keys: Iterable[Key]) -> str:
    """A list of operations, with the process sets that are not the global one."""
    texts = [name + _where(process_set_id) for process_set_id, name in keys]
    return "[" + ", ".join(texts[:_MAX_NAMES]) + (", ..." if len(texts) > _MAX_NAMES else "") + "]"


def _where(process_set_id: SetId) -> str:
    if isinstance(process_set_id, tuple):
        return f" (ranks {', '.join(map(str, process_set_id))})"
    return "" if process_set_id == 0 else f" (process set {process_set_id})"


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
        self.members = {rank for wait in query.waits for rank in ranks_of(process_sets, wait.key[0])}

    def paragraphs(self, states: frozenset[WaitState], *, has_begun: bool) -> dict[int, str]:
        """One for each rank in any of ``states``, or that does not reply."""
        texts = {}
        mark = "!" if self._query.limit == StallLimit.SHUTDOWN else ""
        for rank, host in enumerate(self._hosts):
            reply = self._replies[rank]
            found = {wait.key: state for wait, state in reply.states if state in states}
            if reply.silence:
                found = {
                    wait.key: WaitState.NOT_SUBMITTED
                    for wait in self._query.waits
                    if bool(wait.bucket) == has_begun and rank in ranks_of(self._process_sets, wait.key[0])
                }
            if not found:
                continue
            text = f"{rank}{mark}: {names(found)} - rank {rank} on {host} "
            if reply.silence:
                texts[rank] = f"{text}does not answer: {reply.silence}"
                continue
            if reply.last_name:
                text += f"last submitted {reply.last_name}, {reply.last_age_s:.1f} s ago"
            else:
                text += "has submitted nothing yet"
            if has_begun:
                text += f"; {next(iter(found.values())).value}"
            if reply.waits:
                text += f"; it waits {reply.waits}"
            texts[rank] = f"{text}; process {reply.pid} is at:\n{indented(reply.stack)}"
        return texts
