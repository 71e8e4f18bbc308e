"""Finds the address of each host that the others reach, by connecting to it.

Names of interfaces are not compared. Each host listens for probes (:func:`listen_for_probes`). The others connect to
every address that it may have, and keep those at which a peer proves that it knows the job's secret: another machine
may have the same private address.
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
from hvd_cluster.rendezvous.sockets import ANY

logger = logging.getLogger(__name__)

#: Seconds that a connection may take; an address that does not respond delays the start by this much.
CONNECT_TIMEOUT_S = 2.0
#: Seconds that the authentication may take.
PROBE_TIMEOUT_S = 5.0
#: How many of the other hosts probe each host; if all of them reach it, the rest will too.
NUM_PROBERS = 8
_MAX_PROBES = 64
_NO_ADDRESS = "no address except loopback and link-local ones"
#: Seconds until a probe that was disconnected is repeated.
_RETRY_S = 0.1


def listen_for_probes(secret: bytes, name: str, addresses: Sequence[str] = (ANY,)) -> Listener:
    """A listener that sends this host's name to peers that know the secret."""

    def serve(channel: Channel) -> None:
        with contextlib.closing(channel), contextlib.suppress(OSError):
            channel.send(name.encode())

    return Listener(
        secret, serve, addresses, timeout_s=PROBE_TIMEOUT_S, max_connections=_MAX_PROBES, name="hvd-probe-listener"
    )


@dataclass(frozen=True)
class HostAddresses:
    """The addresses that a host may be reached at."""

    #: Unique name of the host in the job.
    name: str
    #: The addresses, best first.
    addresses: tuple[str, ...]
    #: The port of its listener for probes.
    port: int


def probe(candidates: Sequence[HostAddresses], secret: bytes) -> dict[str, tuple[str, ...]]:
    """Connect to every address from this host.

    Returns the addresses that answered, by host name.
    """
    pairs = [(candidate, address) for candidate in candidates for address in candidate.addresses]
    if not pairs:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(pairs)), thread_name_prefix="hvd-probe") as pool:
        answers = list(pool.map(lambda pair: _answers(pair[0], pair[1], secret), pairs))
    return {
        candidate.name: tuple(a for (other, a), ok in zip(pairs, answers, strict=True) if ok and other is candidate)
        for candidate in candidates
    }


def _answers(candidate: HostAddresses, address: str, secret: bytes) -> bool:
    deadline_s = time.monotonic() + PROBE_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((address, candidate.port), timeout=CONNECT_TIMEOUT_S) as sock:
                channel = Channel.connect(sock, secret, PROBE_TIMEOUT_S)
                channel.settimeout(PROBE_TIMEOUT_S)
                return channel.recv() == candidate.name.encode()
        except (OSError, EOFError) as error:  # AuthenticationError is an OSError: not a host of the job
            logger.debug("%s does not answer at %s: %s", candidate.name, address, error)
            # Try again if the listener dropped this connection because it had too many.
            if not isinstance(error, HungUpError) or time.monotonic() >= deadline_s:
                return False
        time.sleep(_RETRY_S)


def probers(names: Sequence[str], name: str) -> list[str]:
    """The hosts that should probe ``name``: the next ones in the circle. Pure."""
    start = names.index(name)
    return [names[(start + step) % len(names)] for step in range(1, min(len(names) - 1, NUM_PROBERS) + 1)]


def choose_addresses(
    candidates: Sequence[HostAddresses],
    reached: Mapping[str, Mapping[str, tuple[str, ...]]],
    known: Collection[str] = (),
) -> tuple[dict[str, str], dict[str, str]]:
    """The first address of each host at which all of its probers reached it. Pure.

    A host that is cut off reaches no other host either, so by that rule alone no host would remain. As long as some
    host has no address, the one with the fewest connections is removed and the others are checked again without it.

    Args:
        candidates: one per host.
        reached: prober -> host -> the addresses at which the host answered. A prober without any result is gone and
            does not count.
        known: hosts that are preferred to stay if another one has equally few connections.

    Returns:
        The addresses by host; and for each removed host, which hosts reached it at which addresses.
    """
    names = [candidate.name for candidate in candidates]
    left = {candidate.name: candidate for candidate in candidates}
    gone: dict[str, str] = {}
    while True:
        probing = {
            name: [prober for prober in probers(names, name) if prober in left and reached.get(prober)] for name in left
        }
        chosen, lost = _addresses(list(left.values()), probing, reached)
        if not lost:
            return chosen, gone
        links = [(prober, name) for name in left for prober in probing[name] if reached[prober].get(name)]
        worst = min(left, key=lambda name: (sum(name in link for link in links), name in known, name in chosen))
        misses = [name for name in left if worst in probing[name] and not reached[worst].get(name)]
        report = lost.get(worst) or _report(left[worst], probing[worst], reached)
        gone[worst] = report + (f"; it does not reach {', '.join(misses)}" if misses else "")
        del left[worst]


def _addresses(
    candidates: Sequence[HostAddresses],
    probers_of: Mapping[str, Sequence[str]],
    reached: Mapping[str, Mapping[str, tuple[str, ...]]],
) -> tuple[dict[str, str], dict[str, str]]:
    """The first address at which all probers of a host reached it.

    And the reports about hosts without one.
    """
    chosen: dict[str, str] = {}
    lost: dict[str, str] = {}
    for candidate in candidates:
        probing = probers_of[candidate.name]
        good = [
            a for a in candidate.addresses if all(a in reached[prober].get(candidate.name, ()) for prober in probing)
        ]
        if good:
            chosen[candidate.name] = good[0]
        else:
            lost[candidate.name] = _report(candidate, probing, reached)
    return chosen, lost


def _report(
    candidate: HostAddresses, probing: Sequence[str], reached: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> str:
    who = [f"{prober} at {', '.join(reached[prober].get(candidate.name, ())) or 'none'}" for prober in probing]
    addresses = ", ".join(candidate.addresses) or _NO_ADDRESS
    return f"{candidate.name} has {addresses}; reached by {'; '.join(who) or 'no host'}"


def unreachable(lost: Mapping[str, str]) -> LaunchError:
    """The error for hosts without an address that the others reach."""
    return LaunchError(
        "these hosts have no address that all other hosts reach, so the workers could not communicate:\n  "
        + "\n  ".join(lost.values())
        + "\nOpen the ports between the hosts, or set the interfaces to use with --network-interfaces."
    )
