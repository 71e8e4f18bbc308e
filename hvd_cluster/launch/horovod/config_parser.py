"""``horovod.runner.common.util.config_parser``: names of variables.

Flags and config files as variables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from hvd_cluster.launch.cli.config import DESTS, apply_entries
from hvd_cluster.launch.cli.knobs import knob_environment

HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
HOROVOD_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
HOROVOD_CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
HOROVOD_HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HOROVOD_HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
HOROVOD_TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
HOROVOD_AUTOTUNE = "HOROVOD_AUTOTUNE"
HOROVOD_AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
HOROVOD_AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
HOROVOD_TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
HOROVOD_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
HOROVOD_STALL_CHECK_TIME_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
HOROVOD_MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"
HOROVOD_NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
HOROVOD_THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
HOROVOD_LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]


def set_args_from_config(args: Any, config: Mapping[str, Any], override_args: Iterable[str]) -> None:
    """Set attributes of ``args`` from the sections of a config file.

    Args:
        args: from ``parse_args``, or a :class:`~hvd_cluster.launch.horovod.arguments._HorovodArgs`.
        config: section -> key -> value, as in the YAML of ``--config-file``.
        override_args: names of those that the command line has set, which are not changed.

    Raises:
        ValueError: the config sets something that no flag can set; the message names all such entries.
    """
    found = argparse.Namespace(**dict.fromkeys(DESTS), notes=getattr(args, "notes", None))
    apply_entries(found, config, "config")
    kept = set(override_args)
    for dest in DESTS:
        value = getattr(found, dest)
        if value is not None and dest not in kept:
            setattr(args, dest, value)
    args.notes = found.notes


def validate_config_args(args: Any) -> None:
    """Check that values are in range.

    Raises:
        ValueError: some are not; the message names their flags.
    """
    knob_environment(args)


def set_env_from_args(env: MutableMapping[str, str], args: Any) -> MutableMapping[str, str]:
    """Add the variables for the flags in ``args`` to ``env``, and return it.

    Raises:
        ValueError: values are out of range; the message names their flags.
    """
    env.update(knob_environment(args))
    return env
