"""The hosts that a batch system has given to this job: LSF's and Slurm's variables as a list of hosts. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from hvd_cluster.launch.hosts import Host


@dataclass(frozen=True)
class Allocation:
    """What a batch system says."""

    #: "LSF" or "Slurm".
    system: str
    hosts: list[Host]


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process is in, or None.

    Args:
        environ: the launcher's environment.

    Raises:
        ValueError: a batch system's variables are there, but cannot be read.
    """
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_JOB_NODELIST"):
        return Allocation("Slurm", _slurm(environ))
    if environ.get("LSB_JOBID"):
        hosts = _lsf(environ)
        if hosts:
            return Allocation("LSF", hosts)
    return None


def _lsf(environ: Mapping[str, str]) -> list[Host]:
    """LSB_MCPU_HOSTS is "host1 2 host2 4"; LSB_DJOB_HOSTFILE has a line per slot; LSB_HOSTS is that file in one line.

    On clusters where a job is launched from a batch node of its own, that one comes first with one slot and is not
    meant to compute: LSF says so by LSB_DJOB_NUMPROC or by the name "batch".
    """
    file = environ.get("LSB_DJOB_HOSTFILE", "")
    if file and Path(file).is_file():
        names = Path(file).read_text(encoding="utf-8").split()
        counts = dict(Counter(names))
    elif pairs := environ.get("LSB_MCPU_HOSTS", "").split():
        if len(pairs) % 2 or not all(number.isdigit() for number in pairs[1::2]):
            raise ValueError(f"LSB_MCPU_HOSTS={' '.join(pairs)!r} cannot be read as 'host slots host slots'")
        counts = {name: int(number) for name, number in zip(pairs[::2], pairs[1::2], strict=True)}
    else:
        counts = dict(Counter(environ.get("LSB_HOSTS", "").split()))
    hosts = [Host(name, count) for name, count in counts.items() if count > 0]
    if len(hosts) > 1 and hosts[0].slots == 1 and hosts[0].name.startswith("batch"):
        del hosts[0]
    return hosts


def _slurm(environ: Mapping[str, str]) -> list[Host]:
    """Slots are tasks where the job asked for tasks, else GPUs where it has some, else one for each node."""
    names = expand_nodes(environ["SLURM_JOB_NODELIST"])
    for variable in ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if environ.get(variable):
            counts = expand_counts(environ[variable], len(names))
            # One task per node is what a job gets that asked for nodes only: then its GPUs say more.
            if set(counts) != {1} or "SLURM_NTASKS" in environ:
                return [Host(name, count) for name, count in zip(names, counts, strict=True)]
    gpus = re.search(r"(\d+)$", environ.get("SLURM_GPUS_ON_NODE", ""))
    return [Host(name, int(gpus[1]) if gpus and int(gpus[1]) else 1) for name in names]


def expand_nodes(text: str) -> list[str]:
    """Slurm's ``"a[1-3,07],b,c[1-2]x[0-1]"`` as names; numbers keep their leading zeros.

    Raises:
        ValueError: the brackets do not match.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)  # texts at even places, what was in brackets at odd ones
        choices = [[piece] if index % 2 == 0 else _numbers(piece, text) for index, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in product(*choices)]
    if text.count("[") != text.count("]") or not names:
        raise ValueError(f"SLURM_JOB_NODELIST={text!r} cannot be read")
    return names


def _numbers(text: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"SLURM_JOB_NODELIST={whole!r} cannot be read")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str, num_nodes: int) -> list[int]:
    """Slurm's ``"2(x3),1"`` as [2, 2, 2, 1]; a single number holds for all nodes.

    Raises:
        ValueError: it is something else, or does not give one number per node.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text!r} cannot be read")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) == 1:
        counts *= num_nodes
    if len(counts) != num_nodes:
        raise ValueError(f"SLURM_TASKS_PER_NODE={text!r} does not fit {num_nodes} nodes")
    return counts
