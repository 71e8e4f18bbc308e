"""Finds the network interfaces that the nodes of a job have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.ray.session import load_ray
from hvd_cluster.rendezvous.addresses import interface_names, named, outward_interfaces


def detect_nics(
    settings: Any,
    all_host_names: Sequence[str] | None = None,  # noqa: ARG001 - Horovod's signature
    node_workers: Sequence[Any] | None = None,
) -> set[str]:
    """The interfaces that all nodes have, with different addresses.

    If ``settings.nics`` names some, only those among them. An executor does not need this function: workers use the
    interface on the route to the driver's node, or that of ``nics``.

    Args:
        settings: any object with ``nics``; see :class:`~hvd_cluster.ray.coordinator.Coordinator`.
        all_host_names: accepted for compatibility; the workers are asked instead.
        node_workers: an actor of :class:`~hvd_cluster.ray.worker.BaseHorovodWorker` on each node; without any, this
            process's own interfaces are used.

    Returns:
        Their names.

    Raises:
        LaunchError: there is none; the message lists the interfaces of each node.
    """
    workers = list(node_workers or ())
    wanted = list(interface_names(settings.nics))
    if workers:
        found = map_blocking(lambda worker: worker.execute.remote(lambda _: outward_interfaces()), workers)
    else:
        found = [outward_interfaces()]
    usable = [named(addresses, wanted) for addresses in found]
    common = set.intersection(*map(set, usable))
    if not common:
        there = "; ".join(f"node {index}: {', '.join(addresses) or 'none'}" for index, addresses in enumerate(found))
        among = f" among nics={','.join(wanted)}" if wanted else ""
        raise LaunchError(f"the nodes have no network interface in common{among}. They have: {there}")
    # A container bridge has the same address on every node and does not reach the other nodes.
    num_addresses = {name: len({addresses[name] for addresses in usable}) for name in common}
    return {name for name in common if num_addresses[name] == max(num_addresses.values())}


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """Call ``fn``, which returns an ``ObjectRef``, on each item; return the results."""
    results: list[Any] = load_ray().get([fn(each) for each in collection])
    return results
