"""The flags of ``hvdrun``: names and forms are Horovod's."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hvd_cluster.settings import MIB, Settings

#: Flag -> (field of Settings, its unit in units of the field, help).
KNOBS: Mapping[str, tuple[str, type[int] | type[float], int, str]] = {
    "--fusion-threshold-mb": ("fusion_threshold_bytes", int, MIB, "size of a fused buffer in MiB; 0 turns fusion off"),
    "--cycle-time-ms": ("cycle_time_ms", float, 1, "how long small requests wait for company, in milliseconds"),
    "--cache-capacity": ("cache_capacity", int, 1, "number of remembered requests; 0 turns the cache off"),
    "--gloo-timeout-seconds": ("gloo_timeout_s", float, 1, "seconds for connecting and for one collective"),
    "--start-timeout": ("start_timeout_s", float, 1, "seconds within which the workers must meet"),
}

#: Flags of Horovod whose promise holds whether they are given or not.
KEPT_ANYWAY: Sequence[str] = (
    *("--gloo", "--disable-cache", "--no-autotune", "--no-hierarchical-allreduce", "--no-hierarchical-allgather"),
    *("--no-torus-allreduce", "--no-timeline-mark-cycles"),
)

#: Flags of Horovod that a later version brings, by the number of their values.
LATER: Mapping[str, int] = {
    **dict.fromkeys(
        [
            *("--hierarchical-allreduce", "--hierarchical-allgather", "--torus-allreduce"),
            *("--autotune", "--no-stall-check", "--stall-check"),
            *("--mpi-threads-disable", "--no-mpi-threads-disable", "--tcp", "--mpi", "--jsrun"),
            *("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        ],
        0,
    ),
    **dict.fromkeys(
        [
            *("--network-interfaces", "--network-interface", "--config-file"),
            *("-p", "--ssh-port", "-i", "--ssh-identity-file"),
            *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"),
            *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
            *("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host", "--elastic-timeout"),
            *("--reset-limit", "--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
            *("--mpi-args", "--binding-args", "--num-nccl-streams", "--thread-affinity"),
            *("--log-level", "-hostfile", "--hostfile", "--host-discovery-script"),
        ],
        1,
    ),
    "--blacklist-cooldown-range": 2,
}


class _Later(argparse.Action):
    """Refuses a flag that would otherwise be accepted and do nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.exit(2, f"{parser.prog}: {option_string} is not available in this version\n")


def build_parser(prog: str, version: str) -> argparse.ArgumentParser:
    """The parser; ``version`` is what ``--version`` prints."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} -np N [options] command [argument ...]",
        description="Run a command as N workers on this host that form one world.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=version)
    add("-np", "--num-proc", dest="num_proc", type=int, metavar="N", help="number of workers")
    add("-cb", "--check-build", action="store_true", help="show what is built in and exit")
    add("-H", "--hosts", help="hosts and their slots, as localhost:4; only this host in this version")
    add("--verbose", action="store_true", help="tell what the launcher does")
    add(
        "--output-filename",
        metavar="DIR",
        help="keep each worker's output in DIR/rank.<rank>/stdout and .../stderr too",
    )
    add(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        dest="prefix_output_with_timestamp",
        action="store_true",
        help="put the time before each line of output",
    )
    add("--as-horovod", action="store_true", help="let `import horovod` resolve in the workers, as horovodrun does")
    for flag, (field, kind, _, text) in KNOBS.items():
        add(flag, dest=field, type=kind, metavar="X", help=text)
    add("--timeline-filename", metavar="FILE", help="write a timeline of the collectives, to be opened in Perfetto")
    add("--timeline-mark-cycles", action="store_true", help="mark the engine's cycles in the timeline")
    for flag in KEPT_ANYWAY:
        add(flag, action="store_true", dest="kept_anyway", help=argparse.SUPPRESS)
    for flag, num_values in LATER.items():
        add(flag, action=_Later, nargs=num_values, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def knob_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables for those knobs that were given, so that they beat the environment even where they equal a default.

    Raises:
        ValueError: a value is out of range; the text names the flag.
    """
    given: dict[str, Any] = {}
    for flag, (field, _, unit, _) in KNOBS.items():
        value = getattr(arguments, field)
        if value is None:
            continue
        if value < 0:
            raise ValueError(f"{flag}={value} must be >= 0")
        given[field] = value * unit
    if arguments.timeline_filename:
        given["timeline"] = arguments.timeline_filename
    if arguments.timeline_mark_cycles:
        given["timeline_mark_cycles"] = True
    Settings(**given)  # checks the ranges
    names = {field.name: field.metadata["env"] for field in fields(Settings)}
    return {names[name]: str(int(value)) if isinstance(value, bool) else str(value) for name, value in given.items()}
