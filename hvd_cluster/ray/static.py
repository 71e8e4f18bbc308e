"""A RayExecutor with a fixed number of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.call import PackedCall, pack_call
from hvd_cluster.launch.checks import checked_variables
from hvd_cluster.launch.logs import printer
from hvd_cluster.ray.actor import ActorCall, OutputSinks
from hvd_cluster.ray.actor_group import ActorGroup
from hvd_cluster.ray.adapter import Adapter, Callback
from hvd_cluster.ray.callbacks import CallbackLoop
from hvd_cluster.ray.pickling import MODULE_REMEDY, dumps
from hvd_cluster.ray.settings import MiniSettings
from hvd_cluster.ray.strategy import Strategy


class StaticAdapter(Adapter):
    """Workers that run from :meth:`start` to :meth:`shutdown`.

    Args:
        settings: the timeouts, the interface, the verbosity.
        strategy: creates the placement strategy at each start, because the program may be in another placement group
            then.
    """

    def __init__(self, settings: MiniSettings, strategy: Callable[[], Strategy]) -> None:
        self._settings = settings
        self._strategy = strategy
        self._actors: ActorGroup | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        self.shutdown()
        executable = None if executable_cls is None else packed(executable_cls, executable_args, executable_kwargs)
        settings = self._settings
        self._actors = ActorGroup(
            self._strategy(),
            OutputSinks(printer(None, None, with_timestamp=False, verbose=int(settings.verbose))),
            {**settings.environment, **checked_variables(extra_env_vars)},
            placement_timeout_s=settings.placement_group_timeout_s,
            start_timeout_s=settings.timeout_s,
        )
        self._actors.start(executable)

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        return self._started().call(ActorCall("perform", (packed(fn), True)), CallbackLoop(callbacks))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        return self._started().call(ActorCall("perform", (packed(fn, args, kwargs), False)), CallbackLoop(callbacks))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        return self._started().call_remote(ActorCall("call", (packed(fn, args, kwargs),)))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self._started().call_one(ActorCall("perform", (packed(fn), True)))

    def shutdown(self) -> None:
        if self._actors is not None:
            self._actors.close()

    def _started(self) -> ActorGroup:
        if self._actors is None:
            raise LaunchError("the executor has no workers: call start() first")
        return self._actors


def packed(
    fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> PackedCall:
    """A call for workers on other machines; what they cannot import is pickled by value.

    Raises:
        TypeError: ``args`` is not a list or tuple, ``kwargs`` not a dict, or ``fn`` not a function.
        LaunchError: something cannot be pickled.
    """
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise TypeError(f"the arguments of a function must be a list or a tuple, such as [3], not {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"the keyword arguments of a function must be a dict, such as {{'epochs': 3}}, not {kwargs!r}")
    return pack_call(fn, tuple(args or ()), dict(kwargs or {}), shared_path=False, dumps=dumps, remedy=MODULE_REMEDY)
