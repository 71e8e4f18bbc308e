"""A RayExecutor whose number of workers is elastic.

Each call is an elastic job of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hvd_cluster.errors import HorovodInternalError, LaunchError, StartTimeoutError
from hvd_cluster.launch.call import PackedCall
from hvd_cluster.launch.elastic.controller import ElasticController
from hvd_cluster.launch.elastic.discovery import HostDiscovery
from hvd_cluster.launch.outcome import Outcome, collect
from hvd_cluster.launch.spec import ElasticSpec
from hvd_cluster.ray.actor import ActorCall
from hvd_cluster.ray.adapter import Adapter, Callback
from hvd_cluster.ray.callbacks import CallbackLoop
from hvd_cluster.ray.discovery import BundleDiscovery, NodeDiscovery
from hvd_cluster.ray.node_fleet import NodeFleet
from hvd_cluster.ray.resources import WorkerResources, bundles_of
from hvd_cluster.ray.session import ENDED, Connection
from hvd_cluster.ray.settings import ElasticSettings
from hvd_cluster.ray.spec import group_to_use
from hvd_cluster.ray.start_watch import StartWatch
from hvd_cluster.ray.strategy import in_use, missing, too_small
from hvd_cluster.rendezvous.secret import new_secret

#: Seconds between two checks for room.
_POLL_S = 0.5


class ElasticAdapter(Adapter):
    """Jobs with ``min_num_proc`` to ``max_num_proc`` workers."""

    def __init__(self, settings: ElasticSettings, resources: WorkerResources, use_current_group: bool = True) -> None:
        self._settings = settings
        self._resources = resources
        self._use_current_group = use_current_group
        self._executable: PackedCall | None = None
        self._env: dict[str, str | None] = {}
        #: The placement group that the program runs in; Ray reports it only to the program's own thread.
        self._group: Any = None
        self._is_started = False
        self._connection = Connection()

    def start_packed(self, executable: PackedCall | None, env: Mapping[str, str | None]) -> None:
        """Wait for room for ``min_num_proc`` workers.

        They start, and create their executables, with each call.
        """
        self._settings.options(env)  # reports invalid settings now
        self._connection = Connection.current()
        self._group = group_to_use(self._use_current_group)
        self._await_room(self._group)
        self._executable, self._env = executable, dict(env)
        self._is_started = True

    def call_remote(self, call: PackedCall) -> NoReturn:
        raise NotImplementedError("run_remote: the workers of an elastic job may change while it runs; call run()")

    def call_one(self, call: PackedCall) -> NoReturn:
        raise NotImplementedError("execute_single: an elastic job has no rank 0 between two calls; call execute()")

    def shutdown(self) -> None:
        self._is_started = False

    def call(self, call: PackedCall, with_executable: bool, callbacks: Sequence[Callback] | None) -> list[Any]:
        if not self._is_started:
            raise LaunchError("the executor has no workers: call start() first")
        if self._connection.has_ended:
            raise LaunchError(f"the executor has no workers: {ENDED}. Call start() first.")
        group = self._group
        settings = self._settings
        spec = self._spec(self._env)
        loop = CallbackLoop(callbacks)
        with contextlib.ExitStack() as stack:
            actor_call = ActorCall("perform", (call, with_executable, self._executable))
            fleet = NodeFleet(new_secret(), self._resources, actor_call, loop.put, group)
            stack.callback(fleet.close)
            fleet.open(others=True)
            discovery = self._discovery(group, fleet)
            controller = stack.enter_context(
                ElasticController(
                    spec,
                    fleet,
                    discovery,
                    settings.options({}).callbacks(),
                    lambda ended: fatal_reason(ended, fleet.has_world, bool(controller.hosts.usable())),
                )
            )
            watch = StartWatch(
                fleet.num_reported, controller.hosts.usable, settings.min_num_proc, settings.timeout_s, controller.stop
            )
            stack.callback(watch.close)
            try:
                outcomes = loop.until(controller.run, controller.stop)
            except LaunchError as error:
                raise watch.error or error from None
        return collect(outcomes)

    def _discovery(self, group: Any, fleet: NodeFleet | None = None) -> HostDiscovery:
        if self._settings.discovery is not None:
            return self._settings.discovery
        if group is not None:
            return BundleDiscovery(group, self._resources, fleet.num_in_bundle if fleet else lambda _: 0)
        return NodeDiscovery(self._resources, fleet.num_workers if fleet else lambda _: 0)

    def _await_room(self, group: Any) -> None:
        """Wait until there is room for the workers to start with.

        Raises:
            StartTimeoutError: there is none within ``placement_group_timeout_s``; the message says what is missing.
            NotEnoughSlotsError: the placement group that the program runs in is too small.
        """
        needed, settings = self._settings.min_num_proc, self._settings
        if settings.discovery is not None:
            return  # the program's own discovery; elastic_timeout limits the wait for it
        if group is not None and sum(self._resources.slots(bundle.resources) for bundle in bundles_of(group)) < needed:
            raise too_small(group, self._resources, f"min_workers={needed} are needed")
        discovery = self._discovery(group)
        deadline_s = time.monotonic() + settings.placement_group_timeout_s
        while sum(discovery.find_available_hosts_and_slots().values()) < needed:
            if time.monotonic() > deadline_s and group is not None:
                raise in_use(
                    group, self._resources, f"min_workers={needed} are needed", settings.placement_group_timeout_s
                )
            if time.monotonic() > deadline_s:
                raise StartTimeoutError(
                    f"no room for min_workers={needed} within {settings.placement_group_timeout_s:g} s: "
                    f"{missing(self._resources.bundle(), needed, 'PACK')}. "
                    "create_settings(placement_group_timeout_s=...) sets how long to wait."
                )
            time.sleep(_POLL_S)

    def _spec(self, env: Mapping[str, str | None]) -> ElasticSpec:
        options = self._settings.options(env)
        task = options.task(b"")  # the fleet has the call that every worker runs
        return ElasticSpec.of(options, task, options.settings(), is_discovered=True)


def fatal_reason(outcome: Outcome, has_world: bool, has_other_nodes: bool) -> str:
    """Why one worker's failure should end the job; empty if it should not.

    It should where another node would not help. Pure.

    Args:
        has_other_nodes: there are usable nodes on which no worker has failed.
    """
    error = outcome.error
    if has_world or error is None:
        return ""
    raised = error.exception()
    if isinstance(raised, (ConnectionError, TimeoutError, HorovodInternalError)):
        return ""
    if not isinstance(raised, OSError):
        return f"rank {outcome.rank} raised {error.type_name} before the first world, and would do so on any node"
    if has_other_nodes:
        return ""  # a file that is missing on this node, or a full disk
    return f"rank {outcome.rank} raised {error.type_name} before the first world, and there is no other node to try"
