"""A RayExecutor whose workers may come and go: each call is an elastic job of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hvd_cluster.launch.elastic.driver import ElasticDriver
from hvd_cluster.launch.elastic.host_manager import HostManager
from hvd_cluster.launch.elastic.spec import ElasticSpec
from hvd_cluster.launch.logs import printer
from hvd_cluster.launch.outcome import collect
from hvd_cluster.launch.process import ignore_event
from hvd_cluster.launch.task import Task
from hvd_cluster.oldpaths.carry import carries
from hvd_cluster.ray.actor import Order
from hvd_cluster.ray.adapter import Adapter, Callback, checked_variables
from hvd_cluster.ray.callbacks import CallbackLoop
from hvd_cluster.ray.discovery import NodeDiscovery
from hvd_cluster.ray.node_fleet import NodeFleet
from hvd_cluster.ray.resources import WorkerResources
from hvd_cluster.ray.session import connect
from hvd_cluster.ray.settings import ElasticSettings
from hvd_cluster.ray.static import packed
from hvd_cluster.rendezvous.secret import new_secret


class ElasticAdapter(Adapter):
    """Jobs of between ``min_num_proc`` and ``max_num_proc`` workers.

    Args:
        settings: what the user wants.
        resources: what a worker takes.
    """

    def __init__(self, settings: ElasticSettings, resources: WorkerResources) -> None:
        self._settings = settings
        self._resources = resources
        self._executable: bytes | None = None
        self._env: dict[str, str | None] = {}
        self._is_started = False

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Workers start with each call, and make an executable each."""
        connect()
        self._spec({})  # its mistakes are told now
        self._executable = (
            None if executable_cls is None else packed(executable_cls, executable_args, executable_kwargs)
        )
        self._env = checked_variables(extra_env_vars)
        self._is_started = True

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        return self._run(Order("perform", (packed(fn), True, self._executable)), callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        return self._run(Order("perform", (packed(fn, args, kwargs), False, self._executable)), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        raise NotImplementedError("run_remote: the workers of an elastic job change while it runs; call run()")

    def execute_single(self, fn: Callable[[Any], Any]) -> NoReturn:
        raise NotImplementedError("execute_single: an elastic job has no rank 0 between two calls; call execute()")

    def shutdown(self) -> None:
        self._is_started = False

    def _run(self, order: Order, callbacks: Sequence[Callback] | None) -> list[Any]:
        if not self._is_started:
            raise ValueError("the executor has no workers: call start() first")
        connect()
        settings = self._settings
        spec = self._spec({**settings.environment, **self._env})
        loop = CallbackLoop(callbacks)
        on_line = printer(None, None, with_timestamp=False, verbose=int(settings.verbose))
        with contextlib.ExitStack() as stack:
            fleet = NodeFleet(new_secret(), self._resources, order, loop.put)
            stack.callback(fleet.close)
            fleet.open(others=True)
            driver = ElasticDriver(spec, fleet, on_line, ignore_event)
            stack.callback(driver.close)
            discovery = settings.discovery or NodeDiscovery(self._resources, fleet.num_workers)
            manager = HostManager(discovery, fleet, spec.cooldown_range_s, spec.discovery_interval_s, driver.ring.set)
            stack.callback(manager.close)
            manager.start()
            outcomes = loop.until(lambda: driver.run(manager), driver.stop)
        return collect(outcomes)

    def _spec(self, env: Mapping[str, str | None]) -> ElasticSpec:
        settings = self._settings
        return ElasticSpec(
            # The order that the fleet holds says what a worker does.
            task=Task(call=b"", env=env, as_horovod=carries()),
            num_proc=settings.min_num_proc,
            min_num_proc=settings.min_num_proc,
            max_num_proc=settings.max_num_proc,
            is_discovered=True,
            reset_limit=settings.reset_limit,
            cooldown_range_s=settings.cooldown_range,
            elastic_timeout_s=settings.elastic_timeout,
        )
