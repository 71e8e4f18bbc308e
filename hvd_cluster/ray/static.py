"""A RayExecutor with a fixed number of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.call import PackedCall
from hvd_cluster.ray.actor import ActorCall
from hvd_cluster.ray.actor_group import ActorGroup
from hvd_cluster.ray.adapter import Adapter, Callback
from hvd_cluster.ray.callbacks import CallbackLoop
from hvd_cluster.ray.settings import MiniSettings
from hvd_cluster.ray.strategy import Strategy


class StaticAdapter(Adapter):
    """Workers that run from :meth:`start` to :meth:`shutdown`.

    Args:
        strategy: creates the placement strategy at each start, because the program may be in another placement group
            then.
    """

    def __init__(self, settings: MiniSettings, strategy: Callable[[], Strategy]) -> None:
        self._settings = settings
        self._strategy = strategy
        self._actors: ActorGroup | None = None

    def start_packed(self, executable: PackedCall | None, env: Mapping[str, str | None]) -> None:
        self.shutdown()
        settings, options = self._settings, self._settings.options(env)
        self._actors = ActorGroup(
            self._strategy(),
            options.callbacks(),
            options.variables,
            placement_timeout_s=settings.placement_group_timeout_s,
            start_timeout_s=settings.timeout_s,
        )
        self._actors.start(executable)

    def call(self, call: PackedCall, with_executable: bool, callbacks: Sequence[Callback] | None) -> list[Any]:
        return self._started().call(ActorCall("perform", (call, with_executable)), CallbackLoop(callbacks))

    def call_remote(self, call: PackedCall) -> list[Any]:
        return self._started().call_remote(ActorCall("call", (call,)))

    def call_one(self, call: PackedCall) -> Any:
        return self._started().call_one(ActorCall("perform_alone", (call,)))

    def shutdown(self) -> None:
        if self._actors is not None:
            self._actors.close()

    def _started(self) -> ActorGroup:
        if self._actors is None:
            raise LaunchError("the executor has no workers: call start() first")
        return self._actors
