"""Finds the address of each host that the others reach, by connecting to it and not by comparing interface names.

Each host listens for probes (:func:`listen_for_probes`). The others connect to every address that it may have, and keep
those at which a peer proves that it knows the job's secret: another machine may have the same private address.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.wire.listener import Listener
from hvd_cluster.rendezvous.channel import Channel, HungUpError
from hvd_cluster.rendezvous.listening import ANY

logger = logging.getLogger(__name__)

#: Seconds that a connection may take: an address that leads nowhere holds the start up for so long.
CONNECT_TIMEOUT_S = 2.0
#: Seconds that the proof may take which follows.
PROBE_TIMEOUT_S = 5.0
#: How many of the other hosts call each one: with that many probers the rest will reach it too.
NUM_PROBERS = 8
_MAX_PROBES = 64
_NO_ADDRESS = "no IPv4 address, and IPv4 is needed"
#: Seconds until one who was pushed out calls again.
_RETRY_S = 0.1


def listen_for_probes(secret: bytes, name: str, addresses: Sequence[str] = (ANY,)) -> Listener:
    """A listener that sends the name of this host to every peer that knows the secret.

    Args:
        secret: the job's secret.
        name: the name of this host in the job.
        addresses: the addresses to listen on; all interfaces by default.
    """

    def serve(channel: Channel) -> None:
        with contextlib.closing(channel), contextlib.suppress(OSError):
            channel.send(name.encode())

    return Listener(
        secret, serve, addresses, timeout_s=PROBE_TIMEOUT_S, max_connections=_MAX_PROBES, name="hvd-probe-listener"
    )


@dataclass(frozen=True)
class HostAddresses:
    """Where a host says that it can be reached."""

    #: Unique name of the host in the job.
    name: str
    #: Addresses, best first.
    addresses: tuple[str, ...]
    #: Port of its :class:`ProbeListener`.
    port: int


def probe(claims: Sequence[HostAddresses], secret: bytes) -> dict[str, tuple[str, ...]]:
    """Call every claimed address from here; returns those that answered, by name of the host."""
    pairs = [(claim, address) for claim in claims for address in claim.addresses]
    if not pairs:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(pairs)), thread_name_prefix="hvd-call") as pool:
        answers = list(pool.map(lambda pair: _answers(pair[0], pair[1], secret), pairs))
    return {
        claim.name: tuple(a for (other, a), ok in zip(pairs, answers, strict=True) if ok and other is claim)
        for claim in claims
    }


def _answers(claim: HostAddresses, address: str, secret: bytes) -> bool:
    deadline_s = time.monotonic() + PROBE_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((address, claim.port), timeout=CONNECT_TIMEOUT_S) as sock:
                channel = Channel.connect(sock, secret, PROBE_TIMEOUT_S)
                channel.settimeout(PROBE_TIMEOUT_S)
                return channel.recv() == claim.name.encode()
        except (OSError, EOFError) as error:  # AuthenticationError is an OSError: a stranger
            logger.debug("%s does not answer at %s: %s", claim.name, address, error)
            # Who was pushed out by a crowd calls again.
            if not isinstance(error, HungUpError) or time.monotonic() >= deadline_s:
                return False
        time.sleep(_RETRY_S)


def probers(names: Sequence[str], name: str) -> list[str]:
    """The hosts that should call ``name``: the next ones in the circle. Pure."""
    start = names.index(name)
    return [names[(start + step) % len(names)] for step in range(1, min(len(names) - 1, NUM_PROBERS) + 1)]


def choose_addresses(
    claims: Sequence[HostAddresses], reached: Mapping[str, Mapping[str, tuple[str, ...]]], known: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """The first address of each host at which every one of its probers reached it. Pure.

    A host that is cut off reaches nobody either, so by that rule nobody would be left: as long as some host has no
    address, the one with the fewest connections is left out, and the others are looked at again without it.

    Args:
        claims: one per host.
        reached: witness -> host -> the addresses at which the host answered; a witness that says nothing at all has
            gone, and does not count.
        known: hosts that stay where as much speaks against another one.

    Returns:
        The addresses by host; and for each host that was left out, who reached it where.
    """
    names = [claim.name for claim in claims]
    left = {claim.name: claim for claim in claims}
    gone: dict[str, str] = {}
    while True:
        callers = {
            name: [caller for caller in probers(names, name) if caller in left and reached.get(caller)] for name in left
        }
        chosen, lost = _addresses(list(left.values()), callers, reached)
        if not lost:
            return chosen, gone
        links = [(caller, name) for name in left for caller in callers[name] if reached[caller].get(name)]
        worst = min(left, key=lambda name: (sum(name in link for link in links), name in known, name in chosen))
        misses = [name for name in left if worst in callers[name] and not reached[worst].get(name)]
        story = lost.get(worst) or _story(left[worst], callers[worst], reached)
        gone[worst] = story + (f"; it does not reach {', '.join(misses)}" if misses else "")
        del left[worst]


def _addresses(
    claims: Sequence[HostAddresses],
    callers_of: Mapping[str, Sequence[str]],
    reached: Mapping[str, Mapping[str, tuple[str, ...]]],
) -> tuple[dict[str, str], dict[str, str]]:
    """The first address at which all callers of a host reached it; the stories of those that have none."""
    chosen: dict[str, str] = {}
    lost: dict[str, str] = {}
    for claim in claims:
        callers = callers_of[claim.name]
        good = [a for a in claim.addresses if all(a in reached[caller].get(claim.name, ()) for caller in callers)]
        if good:
            chosen[claim.name] = good[0]
        else:
            lost[claim.name] = _story(claim, callers, reached)
    return chosen, lost


def _story(claim: HostAddresses, callers: Sequence[str], reached: Mapping[str, Mapping[str, tuple[str, ...]]]) -> str:
    who = [f"{caller} at {', '.join(reached[caller].get(claim.name, ())) or 'none'}" for caller in callers]
    return f"{claim.name} has {', '.join(claim.addresses) or _NO_ADDRESS}; reached by {'; '.join(who) or 'nobody'}"


def unreachable(lost: Mapping[str, str]) -> LaunchError:
    """The error about hosts that :func:`choose` found no address for."""
    return LaunchError(
        "no address of these hosts is reached by all others, so the workers could not talk to each other:\n  "
        + "\n  ".join(lost.values())
        + "\nOpen the ports between the hosts, or name the interfaces to use with --network-interfaces."
    )
