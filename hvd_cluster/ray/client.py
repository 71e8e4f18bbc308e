"""An executor for a Ray Client process, which runs in an actor of the cluster.

A client has called ``ray.init("ray://...")``. Workers and driver connect to each other, which a client outside the
cluster's network cannot do.
"""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.launch.call import PackedCall, unpack
from hvd_cluster.ray.adapter import Adapter, Callback, packed
from hvd_cluster.ray.resources import in_bundle
from hvd_cluster.ray.session import ENDED, Connection, ConnectionEndedError, is_loss, load_ray
from hvd_cluster.ray.spec import ExecutorSpec
from hvd_cluster.ray.strategy import Reservation

logger = logging.getLogger(__name__)

#: Seconds between two checks for what workers have logged.
_POLL_S = 0.5


class ClientAdapter(Adapter):
    """Forwards every call to an executor in the cluster.

    Its workers' lines have Ray's prefix before ours. The placement group belongs to the client: one created by the
    executor would remain until the client ends.
    """

    def __init__(self, spec: ExecutorSpec, executor_class: type[Any]) -> None:
        self._spec = spec
        self._executor_class = executor_class
        self._actor: Any = None
        self._connection = Connection()
        self._reservation: Reservation | None = None

    def start_packed(self, executable: PackedCall | None, env: Mapping[str, str | None]) -> None:
        self.shutdown()
        arguments = {field.name: getattr(self._spec, field.name) for field in fields(self._spec)}
        options: dict[str, Any] = {}
        self._connection = Connection.current()
        try:
            if self._spec.min_workers is None:
                timeout_s = self._spec.settings.placement_group_timeout_s
                self._reservation = self._spec.strategy().reserve(timeout_s)
                options = in_bundle(self._reservation.group, 0)
                arguments["use_current_placement_group"] = True
            actor_class = load_ray().remote(_RemoteExecutor)
            # One thread for the call, and one for questions about what workers have logged.
            self._actor = actor_class.options(num_cpus=0, max_concurrency=2, **options).remote(
                packed(self._executor_class, kwargs=arguments)
            )
            self._result(self._actor.start.remote(executable, env))
        except BaseException:  # also after an interrupt: what was started must end
            self._drop()
            raise

    def call(self, call: PackedCall, with_executable: bool, callbacks: Sequence[Callback] | None) -> Any:
        return self._forward("call", callbacks, call, with_executable, bool(callbacks))

    def call_remote(self, call: PackedCall) -> Any:
        return self._result(self._started().call_remote.remote(call))

    def call_one(self, call: PackedCall) -> Any:
        return self._forward("call_one", None, call)

    def shutdown(self) -> None:
        try:
            if self._actor is not None and not self._connection.has_ended:
                self._result(self._actor.shutdown.remote())
        except load_ray().exceptions.RayError as error:
            if not is_loss(error):
                raise
            logger.debug("the executor in the cluster has died, and its workers with it: %s", error)
        finally:
            self._drop()

    def _drop(self) -> None:
        """Kill the executor in the cluster, and remove the placement group.

        Its workers end with it.
        """
        actor, self._actor = self._actor, None
        reservation, self._reservation = self._reservation, None
        if actor is not None:
            with contextlib.suppress(ConnectionEndedError):  # it has ended with its client
                self._connection.ray().kill(actor)
        if reservation is not None:
            reservation.release()

    def _started(self) -> Any:
        if self._actor is None:
            raise LaunchError("the executor has no workers: call start() first")
        if self._connection.has_ended:
            self._drop()
            raise LaunchError(f"the executor has no workers: {ENDED}. Call start() first.")
        return self._actor

    def _forward(self, method: str, callbacks: Sequence[Callback] | None, *arguments: Any) -> Any:
        ray, actor = load_ray(), self._started()
        ref = getattr(actor, method).remote(*arguments)
        try:
            while callbacks:
                done, _ = ray.wait([ref], timeout=_POLL_S)
                for info in self._result(actor.logged.remote()):
                    for callback in callbacks:
                        callback(info)
                if done:
                    break
            result = self._result(ref)
        except WorkerFailedError:
            raise
        except BaseException:  # an interrupt, or a callback raised: no caller waits for the workers any more
            self._drop()
            raise
        return result

    def _result(self, ref: Any) -> Any:
        """The result of the executor in the cluster.

        Its exceptions come without Ray's wrapper.
        """
        ray = load_ray()
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, BaseException):
                raise cause from cause.__cause__
            raise


class _RemoteExecutor:
    """In the cluster: the executor, and what its workers have logged."""

    def __init__(self, make: PackedCall) -> None:
        self._executor: Any = unpack(make)()
        self._logged: collections.deque[dict[str, Any]] = collections.deque()

    def start(self, executable: PackedCall | None, env: Mapping[str, str | None]) -> None:
        self._executor.adapter.start_packed(executable, env)

    def call(self, call: PackedCall, with_executable: bool, logs: bool) -> Any:
        return self._executor.adapter.call(call, with_executable, [self._logged.append] if logs else None)

    def call_remote(self, call: PackedCall) -> Any:
        return self._executor.adapter.call_remote(call)

    def call_one(self, call: PackedCall) -> Any:
        return self._executor.adapter.call_one(call)

    def logged(self) -> list[dict[str, Any]]:
        return [self._logged.popleft() for _ in range(len(self._logged))]

    def shutdown(self) -> None:
        self._executor.shutdown()
