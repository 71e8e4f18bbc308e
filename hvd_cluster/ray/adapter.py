"""The interface behind RayExecutor, for its three kinds of workers.

They are a fixed number, an elastic job, or those of an executor in the cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_cluster.launch.call import PackedCall, pack_call
from hvd_cluster.launch.checks import checked_variables
from hvd_cluster.ray.pickling import MODULE_REMEDY, dumps

Callback = Callable[[dict[str, Any]], Any]


class Adapter(ABC):
    """The methods of RayExecutor, on packed calls.

    :class:`hvd_cluster.ray.executor.RayExecutor` documents them.
    """

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        make = None if executable_cls is None else packed(executable_cls, executable_args, executable_kwargs)
        self.start_packed(make, checked_variables(extra_env_vars))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        return self.call(packed(fn), True, callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        return self.call(packed(fn, args, kwargs), False, callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        return self.call_remote(packed(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        return self.call_one(packed(fn))

    @abstractmethod
    def shutdown(self) -> None: ...

    @abstractmethod
    def start_packed(self, executable: PackedCall | None, env: Mapping[str, str | None]) -> None: ...

    @abstractmethod
    def call(self, call: PackedCall, with_executable: bool, callbacks: Sequence[Callback] | None) -> list[Any]: ...

    @abstractmethod
    def call_remote(self, call: PackedCall) -> list[Any]: ...

    @abstractmethod
    def call_one(self, call: PackedCall) -> Any: ...


def packed(
    fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> PackedCall:
    """A call for workers on other machines.

    What they cannot import is pickled by value.

    Raises:
        TypeError: ``args`` is not a list or tuple, ``kwargs`` not a dict, or ``fn`` not a function.
        LaunchError: something cannot be pickled.
    """
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise TypeError(f"the arguments of a function must be a list or a tuple, such as [3], not {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"the keyword arguments of a function must be a dict, such as {{'epochs': 3}}, not {kwargs!r}")
    return pack_call(fn, tuple(args or ()), dict(kwargs or {}), shared_path=False, dumps=dumps, remedy=MODULE_REMEDY)
