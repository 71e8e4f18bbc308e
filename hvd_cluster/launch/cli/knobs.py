"""The flags that set a variable of the workers, and those without effect.

The latter are Horovod's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_cluster.settings import LOG_LEVELS, MIB, Settings


@dataclass(frozen=True)
class Knob:
    """A flag with a value."""

    flag: str
    kind: type[int] | type[float] | type[str]
    help: str
    #: The end of the variable's name, if that is not the flag's.
    name: str = ""
    #: What one unit of the flag is in the variable's unit.
    scale: int = 1
    #: The maximum.
    max_value: float = float("inf")
    choices: Sequence[str] | None = None

    @property
    def dest(self) -> str:
        """The name of the parsed value, as in Horovod."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def variable(self) -> str:
        """The variable that it sets."""
        return f"HOROVOD_{self.name or self.dest.upper()}"


@dataclass(frozen=True)
class Switch:
    """A pair of flags that switch something on and off."""

    #: The name of the parsed value.
    dest: str
    help: str
    #: The end of the variable's name, if that is not ``dest``.
    name: str = ""
    #: The flag that switches it off, if that is not ``--no-`` and the other flag.
    off_flag: str = ""
    #: The variable's value if the switch is on, and if it is off.
    values: tuple[str, str] = ("1", "0")

    @property
    def on(self) -> str:
        """The flag that switches it on."""
        return f"--{self.dest.replace('_', '-')}"

    @property
    def off(self) -> str:
        """The flag that switches it off."""
        return self.off_flag or f"--no-{self.on.removeprefix('--')}"

    @property
    def variable(self) -> str:
        """The variable that it sets."""
        return f"HOROVOD_{self.name or self.dest.upper()}"


_STALL_WARNING = "seconds until a tensor that only some ranks submitted is reported"
_STALL_SHUTDOWN = "seconds until a tensor that waits for other ranks ends the job; 0: never"
_NOISE = "noise that is assumed in the samples, 0 to 1"

KNOBS: Sequence[Knob] = (
    Knob("--fusion-threshold-mb", int, "size of a fused buffer in MiB; 0: no fusion", "FUSION_THRESHOLD", MIB),
    Knob("--cycle-time-ms", float, "milliseconds for which small requests wait to be fused", "CYCLE_TIME"),
    Knob("--cache-capacity", int, "number of remembered requests; 0: no cache"),
    Knob("--autotune-log-file", str, "CSV file with what autotuning tried", "AUTOTUNE_LOG"),
    Knob("--autotune-warmup-samples", int, "samples to discard at the start"),
    Knob("--autotune-steps-per-sample", int, "steps of one sample"),
    Knob("--autotune-bayes-opt-max-samples", int, "total number of samples"),
    Knob("--autotune-gaussian-process-noise", float, _NOISE, max_value=1),
    Knob("--timeline-filename", str, "write a timeline of the collectives, for Perfetto", "TIMELINE"),
    Knob("--stall-check-warning-time-seconds", float, _STALL_WARNING, "STALL_CHECK_TIME_SECONDS"),
    Knob("--stall-check-shutdown-time-seconds", float, _STALL_SHUTDOWN, "STALL_SHUTDOWN_TIME_SECONDS"),
    Knob("--gloo-timeout-seconds", float, "seconds to connect, or for a collective"),
    Knob("--log-level", str, "minimum level of the workers' messages", choices=LOG_LEVELS),
)

_TIMESTAMP = "put the time before each of the workers' messages"
SWITCHES: Sequence[Switch] = (
    Switch("hierarchical_allreduce", "reduce inside each host first"),
    Switch("autotune", "let the engine tune its parameters"),
    Switch("monitor", "write every few seconds what the ranks spend their steps on, and a table at the end"),
    Switch("timeline_mark_cycles", "mark the engine's cycles in the timeline"),
    Switch("stall_check", "report stalls", "STALL_CHECK_DISABLE", values=("0", "1")),
    Switch("log_with_timestamp", _TIMESTAMP, "LOG_HIDE_TIME", "--log-without-timestamp", ("0", "1")),
)

_NO_MPI = "hvd_cluster does not use MPI; leave the flag out"
#: Flags of Horovod that have no effect -> (number of values, what to do instead).
OBSOLETE: Mapping[str, tuple[int, str]] = {
    "--mpi": (0, _NO_MPI),
    "--mpi-threads-disable": (0, _NO_MPI),
    "--no-mpi-threads-disable": (0, _NO_MPI),
    "--mpi-args": (1, _NO_MPI),
    "--tcp": (0, "collectives on CPUs always use TCP; NCCL_IB_DISABLE=1 makes NCCL avoid InfiniBand"),
    "--jsrun": (0, "LSF's hosts are found anyway and reached through ssh; leave the flag out"),
    "--binding-args": (1, "bind the workers with taskset or numactl in the command"),
    "--num-nccl-streams": (1, "NCCL schedules by itself; NCCL_MAX_NCHANNELS limits its use of a GPU"),
    "--thread-affinity": (1, "the engine's thread sleeps without work; bind workers with taskset in the command"),
    "--hierarchical-allgather": (0, "ranks gather from each other directly; leave the flag out"),
    "--torus-allreduce": (0, "use --hierarchical-allreduce"),
    "--log-hide-timestamp": (0, "use --log-without-timestamp"),
    "--no-log-hide-timestamp": (0, "use --log-with-timestamp"),
}
#: Flags of Horovod whose effect hvd_cluster always has. The cache is that of the launcher's checks of hosts.
KEPT_ANYWAY: Sequence[str] = ("--gloo", "--disable-cache", "--no-hierarchical-allgather", "--no-torus-allreduce")


def knob_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables for the given flags, which override the environment.

    Also for flags that equal a default.

    Raises:
        ValueError: values are out of range; the message names the flags.
    """
    wrong: list[str] = []
    variables: dict[str, str] = {}
    for knob in KNOBS:
        value = getattr(arguments, knob.dest, None)
        if value is None:
            continue
        if not isinstance(value, str) and not value >= 0:
            wrong.append(f"{knob.flag}={value} must be >= 0")
        elif not isinstance(value, str) and value > knob.max_value:
            wrong.append(f"{knob.flag}={value} must be <= {knob.max_value:g}")
        else:
            variables[knob.variable] = value if isinstance(value, str) else str(value * knob.scale)
    for switch in SWITCHES:
        is_on = getattr(arguments, switch.dest, None)
        if is_on is not None:
            variables[switch.variable] = switch.values[0 if is_on else 1]
    if wrong:
        raise ValueError("; ".join(wrong))
    try:
        Settings.from_env(variables)
    except ValueError as error:
        raise ValueError(_with_flags(str(error))) from None
    return variables


def _with_flags(text: str) -> str:
    """Replace variables in a message by the flags that set them."""
    for knob in sorted(KNOBS, key=lambda knob: -len(knob.variable)):
        text = text.replace(f"{knob.variable}=", f"{knob.flag}=")
    return text.replace("cannot read these settings from the environment", "cannot use these flags")
