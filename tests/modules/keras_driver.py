"""A process in which the driver of Keras fits runs: what the tests of KerasEstimator share."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def in_driver(env: dict[str, str], fn: Any, args: tuple[Any, ...]) -> Any:
    """Call ``fn(workers, *args)`` in a process that keeps workers for its fits: a driver has one backend of Keras."""
    import sys
    import types

    from hvd_cluster.estimators import Backend
    from hvd_cluster.launch.local import Executor

    kept = sys.modules.setdefault("kept_by_the_tests_of_keras", types.ModuleType("kept_by_the_tests_of_keras"))

    class Kept(Backend):
        def __init__(self, num_proc: int) -> None:
            self._num_proc = num_proc
            self.executor = Executor(num_proc, env=env, verbose=0)
            self.runs = 0

        def run(self, fn, args=(), kwargs=None, env=None):
            self.runs += 1
            return self.executor.run(fn, args, kwargs)

        def num_processes(self):
            return self._num_proc

    def workers(num_proc: int) -> Backend:
        name = f"workers_{num_proc}"
        if not hasattr(kept, name):
            setattr(kept, name, Kept(num_proc))
        return getattr(kept, name)

    return fn(workers, *args)
