"""The hosts that a batch system has allocated to this job. Pure.

They come from LSF's and Slurm's variables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hvd_cluster.launch.hosts import Host
from hvd_cluster.topology import slurm_counts


@dataclass(frozen=True)
class Allocation:
    """The hosts of this job according to a batch system."""

    #: "LSF" or "Slurm".
    system: str
    hosts: list[Host]


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process runs in, or None.

    Raises:
        ValueError: the variables of a batch system cannot be parsed.
    """
    # Of a program that srun has started several times, each process is on its own.
    is_one_of_several = environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1")
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST") and not is_one_of_several:
        return Allocation("Slurm", _slurm(environ))
    if environ.get("LSB_JOBID"):
        hosts = _lsf(environ)
        if hosts:
            return Allocation("LSF", hosts)
    return None


def _lsf(environ: Mapping[str, str]) -> list[Host]:
    """The hosts from LSF's variables.

    LSB_MCPU_HOSTS is "host1 2 host2 4"; LSB_DJOB_HOSTFILE has a line per slot; LSB_HOSTS is that file in one line. On
    clusters that launch jobs from a batch node, that node comes first with one slot and is not meant to compute.
    """
    file = environ.get("LSB_DJOB_HOSTFILE", "")
    if file and Path(file).is_file():
        names = Path(file).read_text(encoding="utf-8").split()
        counts = dict(Counter(names))
    elif pairs := environ.get("LSB_MCPU_HOSTS", "").split():
        if len(pairs) % 2 or not all(number.isdigit() for number in pairs[1::2]):
            raise ValueError(f"LSB_MCPU_HOSTS={' '.join(pairs)!r} is not of the form 'host slots host slots'")
        counts = {name: int(number) for name, number in zip(pairs[::2], pairs[1::2], strict=True)}
    else:
        counts = dict(Counter(environ.get("LSB_HOSTS", "").split()))
    hosts = [Host(name, count) for name, count in counts.items() if count > 0]
    if len(hosts) > 1 and hosts[0].slots == 1 and hosts[0].name.startswith("batch"):
        del hosts[0]
    return hosts


def _slurm(environ: Mapping[str, str]) -> list[Host]:
    """The hosts from Slurm's variables.

    Slots are tasks if the job asked for tasks, else GPUs, else one per node.
    """
    names = expand_nodes(environ["SLURM_JOB_NODELIST"])
    for variable in ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if environ.get(variable):
            counts = slurm_counts(environ, variable)
            if len(counts) == 1:
                counts *= len(names)
            if len(counts) != len(names):
                raise ValueError(f"{variable}={environ[variable]!r} does not fit {len(names)} nodes")
            # A job that asked only for nodes gets one task per node; its GPUs are then the better number.
            if set(counts) != {1} or "SLURM_NTASKS" in environ:
                return [Host(name, count) for name, count in zip(names, counts, strict=True)]
    gpus = re.search(r"(\d+)$", environ.get("SLURM_GPUS_ON_NODE", ""))
    return [Host(name, int(gpus[1]) if gpus and int(gpus[1]) else 1) for name in names]


def expand_nodes(text: str) -> list[str]:
    """Expand Slurm's ``"a[1-3,07],b,c[1-2]x[0-1]"`` to names.

    Numbers keep their leading zeros.

    Raises:
        ValueError: the brackets do not match.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)  # plain text at even positions, the contents of brackets at odd ones
        choices = [[piece] if index % 2 == 0 else _numbers(piece, text) for index, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in product(*choices)]
    if text.count("[") != text.count("]") or not names:
        raise ValueError(f"SLURM_JOB_NODELIST={text!r} cannot be parsed")
    return names


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"SLURM_JOB_NODELIST={whole!r} cannot be parsed")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
