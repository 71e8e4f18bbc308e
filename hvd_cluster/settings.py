"""All knobs in one table: variable, default, unit and rule of each.

The variable is that of the environment. An argument takes precedence over the environment, and the environment over the
default. Only this module reads ``HOROVOD_*`` knobs from the environment; :mod:`hvd_cluster.topology` reads the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)
MIB = 1024 * 1024


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"", "0", "false", "no", "off"}:
        return False
    raise ValueError("is neither 0 nor 1")


def _number(kind: Callable[[str], Number], rule: str, holds: Callable[[Number], bool]) -> Callable[[str], Number]:
    """A parser of numbers that raises ``ValueError`` where the rule does not hold."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not holds(value):
            raise ValueError(f"must be {rule}")
        return value

    return parse


_at_least_zero_int = _number(int, ">= 0", lambda value: value >= 0)
_at_least_one_int = _number(int, ">= 1", lambda value: value >= 1)
_at_least_zero = _number(float, ">= 0", lambda value: value >= 0)
_above_zero = _number(float, "> 0", lambda value: value > 0)
_share = _number(float, "in [0, 1]", lambda value: 0 <= value <= 1)

_port = _number(int, "in [0, 65535]", lambda value: 0 <= value <= 65535)

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(f"is none of {', '.join(LOG_LEVELS)}")
    return text.lower()


def _knob(name: str, default: T, parse: Callable[[str], T], *, is_common: bool = False) -> T:
    """A dataclass field with its environment variable and its parser.

    It also says whether the value must be equal on all ranks.
    """
    return field(default=default, metadata={"env": name, "parse": parse, "is_common": is_common})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The knobs of the engine and the launchers, parsed and checked."""

    #: Bytes of one fused bucket; 0 disables fusion.
    fusion_threshold_bytes: int = _knob("HOROVOD_FUSION_THRESHOLD", 128 * MIB, _at_least_zero_int)
    #: Milliseconds by which the engine delays requests that no thread waits for, to negotiate several at once. The
    #: default is 1 between hosts, and 5 within one host, where negotiation takes CPU time from the computation.
    cycle_time_ms: float | None = _knob("HOROVOD_CYCLE_TIME", None, _at_least_zero)
    #: Number of requests whose signature is cached, so that they are sent as a short id; 0 disables the cache.
    cache_capacity: int = _knob("HOROVOD_CACHE_CAPACITY", 1024, _at_least_zero_int, is_common=True)
    #: Do not fuse grouped requests with other requests.
    disable_group_fusion: bool = _knob("HOROVOD_DISABLE_GROUP_FUSION", False, _flag)
    #: Tune the fusion threshold and the cycle time while the job trains, unless they are set explicitly.
    autotune: bool = _knob("HOROVOD_AUTOTUNE", False, _flag)
    #: The file to which rank 0 writes what autotune has tried; empty for none.
    autotune_log: str = _knob("HOROVOD_AUTOTUNE_LOG", "", str)
    #: Warm-up samples, which only show what a step is like. Horovod's defaults for this and the next two (3, 10, 20)
    #: need more than 200 steps; ours, with one step ignored after each change, at most 48.
    autotune_warmup_samples: int = _knob("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 1, _at_least_zero_int)
    #: Training steps for which each choice is measured.
    autotune_steps_per_sample: int = _knob("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 3, _at_least_one_int)
    #: Maximum number of measurements, each of one choice.
    autotune_max_samples: int = _knob("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 11, _at_least_one_int)
    #: Accepted and ignored: a cost model replaces the Gaussian process.
    autotune_noise: float = _knob("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", 0.8, _share)
    #: Seconds to connect a transport, and for one collective on it.
    gloo_timeout_s: float = _knob("HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0, _above_zero)
    #: Network interface for the data sockets; empty lets the rendezvous choose the one that reaches the driver.
    gloo_interface: str = _knob("HOROVOD_GLOO_IFACE", "", str)
    #: A folder that all hosts share, through which ranks find each other under mpirun, srun or jsrun.
    rendezvous_folder: str = _knob("HOROVOD_RENDEZVOUS_FOLDER", "~/.hvd_cluster", str)
    #: Let the workers of one host exchange votes and tensors through shared memory.
    shared_memory: bool = _knob("HOROVOD_SHARED_MEMORY", True, _flag, is_common=True)
    #: Between hosts, let one rank of each host communicate for all of its ranks.
    hierarchical_allreduce: bool = _knob("HOROVOD_HIERARCHICAL_ALLREDUCE", True, _flag, is_common=True)
    #: MiB that each rank may allocate for tensors in shared memory; None for an equal share of the host's memory.
    shared_memory_region_mb: float | None = _knob(
        "HOROVOD_SHARED_MEMORY_REGION_MB", None, _at_least_zero, is_common=True
    )
    #: Path of the timeline, "DYNAMIC" to start it at run time, or empty for none.
    timeline: str = _knob("HOROVOD_TIMELINE", "", str)
    #: Mark the start of every cycle in the timeline.
    timeline_mark_cycles: bool = _knob("HOROVOD_TIMELINE_MARK_CYCLES", False, _flag)
    #: MiB of the current and the previous file of the timeline together; the oldest events are dropped.
    timeline_max_mb: float = _knob("HOROVOD_TIMELINE_MAX_MB", 256.0, _above_zero)
    #: Write every few seconds what the ranks spend their steps on, and a table at the end.
    monitor: bool = _knob("HOROVOD_MONITOR", False, _flag)
    #: Let the ranks report their step times to rank 0 without writing lines, as the estimators do for their progress.
    report_steps: bool = _knob("HOROVOD_REPORT_STEPS", False, _flag)
    #: Seconds between the monitor's lines.
    monitor_interval_s: float = _knob("HOROVOD_MONITOR_INTERVAL_SECONDS", 5.0, _above_zero)
    #: The port on which rank 0 serves the monitor's numbers as OpenMetrics; None for no port.
    metrics_port: int | None = _knob("HOROVOD_METRICS_PORT", None, _port)
    #: Do not warn about tensors that only some ranks have submitted.
    stall_check_disable: bool = _knob("HOROVOD_STALL_CHECK_DISABLE", False, _flag)
    #: Seconds until a tensor that waits for other ranks is reported.
    stall_warning_s: float = _knob("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, _above_zero)
    #: Seconds until a tensor that waits for other ranks aborts the job; 0 for never.
    stall_shutdown_s: float = _knob("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0, _at_least_zero)
    #: Allow process sets to be added and removed after ``init``.
    dynamic_process_sets: bool = _knob("HOROVOD_DYNAMIC_PROCESS_SETS", False, _flag, is_common=True)
    #: The backend of torch.distributed's default group, which a worker's function finds ready; empty for none.
    torch_backend: str = _knob("HOROVOD_TORCH_BACKEND", "", str)
    #: The job may lose and gain workers.
    elastic: bool = _knob("HOROVOD_ELASTIC", False, _flag)
    #: Seconds that an elastic job waits for enough slots, and its workers for the next world.
    elastic_timeout_s: float = _knob("HOROVOD_ELASTIC_TIMEOUT", 600.0, _above_zero)
    #: Seconds that a worker of an elastic job has to leave a broken world before it is killed.
    elastic_leave_timeout_s: float = _knob("HOROVOD_ELASTIC_LEAVE_TIMEOUT", 300.0, _above_zero)
    #: Seconds that a launcher waits for all workers to report.
    start_timeout_s: float = _knob("HOROVOD_START_TIMEOUT", 30.0, _above_zero)
    #: Seconds that a launcher waits for all workers on Spark, where executors may have to be allocated first.
    spark_start_timeout_s: float = _knob("HOROVOD_SPARK_START_TIMEOUT", 600.0, _above_zero)
    #: Addresses of the GPUs that Spark assigned to this worker, comma-separated; set by the launcher on Spark.
    spark_gpus: str = _knob("HOROVOD_SPARK_GPUS", "", str)
    #: Local folder with the rows that this worker's task received without a store; set by the launcher on Spark.
    rows_dir: str = _knob("HOROVOD_ROWS_DIR", "", str)
    #: The level of the workers' log messages; None leaves it to the program (Python's default is warnings).
    log_level: str | None = _knob("HOROVOD_LOG_LEVEL", None, _log_level)
    #: Omit the time from the workers' log messages.
    log_hide_time: bool = _knob("HOROVOD_LOG_HIDE_TIME", False, _flag)

    def __post_init__(self) -> None:
        wrong: list[str] = []
        for knob in fields(self):
            value = getattr(self, knob.name)
            if value is None:
                continue
            try:
                knob.metadata["parse"](str(value))
            except ValueError as error:
                wrong.append(f"{knob.name}={value!r}: {error}")
        if wrong:
            raise ValueError("cannot use these settings: " + "; ".join(wrong))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from the environment, with ``overrides`` on top.

        They have field names; None means "not given". An empty variable counts as unset.

        Raises:
            ValueError: one or more variables or overrides cannot be used; the text names all of them.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for knob in fields(cls):
            text = environ.get(knob.metadata["env"], "")
            if overrides.get(knob.name) is not None or not text.strip():
                continue
            try:
                values[knob.name] = knob.metadata["parse"](text)
            except ValueError as error:
                wrong.append(f"{knob.metadata['env']}={text!r}: {error}")
        if wrong:
            raise ValueError("cannot read these settings from the environment: " + "; ".join(wrong))
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)

    @classmethod
    def given(cls, environ: Mapping[str, str] | None = None) -> frozenset[str]:
        """The names of the settings that the environment sets.

        Also those that it sets to their default; autotune does not change them.
        """
        environ = os.environ if environ is None else environ
        return frozenset(knob.name for knob in fields(cls) if environ.get(knob.metadata["env"], "").strip())

    @property
    def monitors(self) -> bool:
        """The ranks report their steps to rank 0."""
        return self.monitor or self.report_steps or self.metrics_port is not None

    def common(self) -> dict[str, object]:
        """The settings that must be equal on all ranks, by environment variable."""
        return {knob.metadata["env"]: getattr(self, knob.name) for knob in fields(self) if knob.metadata["is_common"]}
