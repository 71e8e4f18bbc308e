"""Which network interfaces do the nodes of a job have in common?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.checks import interface_names
from hvd_cluster.launch.interfaces import named, outward_interfaces
from hvd_cluster.ray.session import load_ray


def detect_nics(
    settings: Any,
    all_host_names: Sequence[str] | None = None,  # noqa: ARG001 - stands between the two that count
    node_workers: Sequence[Any] | None = None,
) -> set[str]:
    """The interfaces that all nodes have, with an address of their own; or those of ``settings.nics`` among them.

    An executor needs no such call: workers take the interface that reaches the driver's node, or that of ``nics``.

    Args:
        settings: any object with ``nics``; see :class:`~hvd_cluster.ray.coordinator.Coordinator`.
        all_host_names: accepted for Horovod's sake: the workers are asked, not the names.
        node_workers: an actor of :class:`~hvd_cluster.ray.worker.BaseHorovodWorker` on each node; this process's own
            interfaces are meant without any.

    Returns:
        Their names.

    Raises:
        LaunchError: there is none; the text lists what each node has.
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
        wish = f" among nics={','.join(wanted)}" if wanted else ""
        raise LaunchError(f"the nodes have no network interface in common{wish}. They have: {there}")
    # A bridge of containers has the same address on every node, and leads to none of the others.
    num_addresses = {name: len({addresses[name] for addresses in usable}) for name in common}
    return {name for name in common if num_addresses[name] == max(num_addresses.values())}


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """The results of the calls that ``fn``, which returns an ``ObjectRef``, begins for each of ``collection``."""
    results: list[Any] = load_ray().get([fn(each) for each in collection])
    return results
