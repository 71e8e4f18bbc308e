"""The interface behind RayExecutor: a fixed number of workers, an elastic job, or an executor in the cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Callback = Callable[[dict[str, Any]], Any]


class Adapter(ABC):
    """The methods of :class:`hvd_cluster.ray.executor.RayExecutor`, which documents them."""

    @abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None: ...

    @abstractmethod
    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]: ...

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]: ...

    @abstractmethod
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]: ...

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any: ...

    @abstractmethod
    def shutdown(self) -> None: ...
