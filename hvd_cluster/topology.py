"""Topology: a worker's rank, host and rendezvous, which the launcher passes.

:class:`Topology` is passed as environment variables. :meth:`Topology.from_env` reads ours (``HOROVOD_*``) and those of
torchrun, Open MPI, MPICH (PMI), Slurm and LSF's jsrun, and those of platforms that start the processes themselves:
AzureML and others with ``RANK`` and ``MASTER_ADDR``, Kubeflow's TrainJob, SageMaker. A script runs under any of them;
without one, it is a world of one.

:func:`export` is the only place in the package that writes the environment of the running process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

SECRET_VARIABLE = "_HOROVOD_SECRET_KEY"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The ranks of one worker, and how it reaches the others."""

    #: Index over all workers, 0 .. size - 1.
    rank: int = 0
    #: Number of workers.
    size: int = 1
    #: Index over the workers of this host.
    local_rank: int = 0
    #: Number of workers on this host.
    local_size: int = 1
    #: Index of this host among the hosts that have a worker of this local_rank.
    cross_rank: int = 0
    #: Number of hosts that have a worker of this local_rank.
    cross_size: int = 1
    #: Name or address at which other hosts reach this one.
    host: str = "127.0.0.1"
    #: "host:port" of the job's key-value store; empty when the launcher is not ours.
    rendezvous: str = ""
    #: The job's secret; signs every message of the job. Never printed.
    secret: bytes = field(default=b"", repr=False)
    #: Counts the worlds of an elastic job.
    generation: int = 0
    #: Distinguishes concurrent jobs.
    job_id: str = ""
    #: Identifies this process in an elastic job, in which ranks change; empty in other jobs.
    worker: str = ""
    #: The name of a world that ``init(comm=...)`` made of some processes of the job; empty for the world of all.
    world: str = ""
    #: "host:port" for torch.distributed's own rendezvous (MASTER_ADDR, MASTER_PORT), on the host of rank 0.
    master: str = ""
    #: The launcher of this worker: hvd_cluster, torchrun, openmpi, pmi, slurm, lsf, mpi4py, one of PLATFORMS, or "".
    launcher: str = ""

    def __post_init__(self) -> None:
        for index, count in (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size")):
            number, total = getattr(self, index), getattr(self, count)
            if not 0 <= number < total:
                raise ValueError(f"{index}={number} is not in 0 .. {count}-1, with {count}={total}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Read the topology from the variables of the launcher that started this process.

        Raises:
            ValueError: a launcher's variables are incomplete or contradict each other.
        """
        environ = os.environ if environ is None else environ
        for marker, read in _READERS.items():
            if environ.get(marker, "") != "":
                try:
                    return read(environ)
                except KeyError as missing:
                    raise ValueError(
                        f"{marker} is set, but {missing.args[0]} is not: the launch is incomplete"
                    ) from None
        # We and torchrun's agent set GROUP_RANK: a child process without the launcher's own variables is not a rank.
        for platform, names in PLATFORMS.items() if environ.get("GROUP_RANK", "") == "" else ():
            rank, size, address, port = (environ.get(name, "") for name in names)
            if rank and size and address and port:
                return _on_platform(platform, rank, size, join_address(address, int(port)), environ)
        return cls()

    def to_env(self) -> dict[str, str]:
        """The variables that carry this topology.

        They are ours, those that Horovod scripts read, and torchrun's.
        """
        return {name: value for name, value in self._variables().items() if value != ""}

    def _variables(self) -> dict[str, str]:
        rendezvous_host, rendezvous_port = split_address(self.rendezvous)
        master_host, master_port = split_address(self.master)
        variables = {
            "HOROVOD_RANK": self.rank,
            "HOROVOD_SIZE": self.size,
            "HOROVOD_LOCAL_RANK": self.local_rank,
            "HOROVOD_LOCAL_SIZE": self.local_size,
            "HOROVOD_CROSS_RANK": self.cross_rank,
            "HOROVOD_CROSS_SIZE": self.cross_size,
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous_host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": rendezvous_port,
            "HOROVOD_GENERATION": self.generation,
            "HOROVOD_JOB_ID": self.job_id,
            "HOROVOD_WORKER": self.worker,
            SECRET_VARIABLE: self.secret.hex(),
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "GROUP_RANK": self.cross_rank,
            "MASTER_ADDR": master_host,
            "MASTER_PORT": master_port,
        }
        return {name: str(value) for name, value in variables.items()}

    def with_local_indices(self, host_keys: Sequence[str]) -> Topology:
        """The same rank, with its indices on its host and over the hosts.

        Args:
            host_keys: by rank, a string that is equal for the ranks of one host.
        """
        hosts: dict[str, list[int]] = {}  # in the order of each host's first rank
        for rank, key in enumerate(host_keys):
            hosts.setdefault(key, []).append(rank)
        here = hosts[host_keys[self.rank]]
        local_rank = here.index(self.rank)
        peers = [ranks for ranks in hosts.values() if len(ranks) > local_rank]
        return replace(
            self,
            local_rank=local_rank,
            local_size=len(here),
            cross_rank=peers.index(here),
            cross_size=len(peers),
        )

    def with_cross_indices(self, local_ranks: Sequence[int]) -> Topology:
        """The same rank, with its indices over the hosts.

        They follow from the local ranks of all workers.

        Args:
            local_ranks: the local rank of each rank.
        """
        peers = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == self.local_rank]
        return replace(self, cross_rank=peers.index(self.rank), cross_size=len(peers))


def export(
    variables: Mapping[str, str | None], environ: MutableMapping[str, str] | None = None
) -> dict[str, str | None]:
    """Write variables into the environment; return the previous values.

    A value of None removes the variable.
    """
    environ = os.environ if environ is None else environ
    before = {name: environ.get(name) for name in variables}
    for name, value in variables.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return before


#: Other variables that launchers and estimators set for the workers of one job.
_JOB_VARIABLES = frozenset(
    [
        *("HOROVOD_ELASTIC", "HOROVOD_REPORT_STEPS", "HOROVOD_ROWS_DIR"),
        *("HOROVOD_SPARK_GPUS", "HOROVOD_SPARK_WORK_DIR"),
    ]
)


def is_job_variable(name: str) -> bool:
    """Whether a launcher sets a variable for the workers of one job.

    The workers of another job must not inherit it.
    """
    return name in _JOB_VARIABLES or name.startswith("TORCHELASTIC_") or name in _own_variables()


@cache
def _own_variables() -> frozenset[str]:
    return frozenset(Topology()._variables())


def inherited_env() -> dict[str, str]:
    """A copy of this process's environment, to pass to child processes.

    A launcher passes it.
    """
    return dict(os.environ)


def join_address(host: str, port: int | str) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """The host and the port of ``host:port``; two empty strings for an empty address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _ours(environ: Mapping[str, str]) -> Topology:
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    return Topology(
        rank=int(environ["HOROVOD_RANK"]),
        size=int(environ["HOROVOD_SIZE"]),
        local_rank=int(environ["HOROVOD_LOCAL_RANK"]),
        local_size=int(environ["HOROVOD_LOCAL_SIZE"]),
        cross_rank=int(environ["HOROVOD_CROSS_RANK"]),
        cross_size=int(environ["HOROVOD_CROSS_SIZE"]),
        host=environ.get("HOROVOD_HOSTNAME", "127.0.0.1"),
        rendezvous=join_address(address, int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])) if address else "",
        secret=bytes.fromhex(environ.get(SECRET_VARIABLE, "")),
        generation=int(environ.get("HOROVOD_GENERATION", "0")),
        job_id=environ.get("HOROVOD_JOB_ID", ""),
        worker=environ.get("HOROVOD_WORKER", ""),
        master=_master(environ),
        launcher="hvd_cluster",
    )


def _torchrun(environ: Mapping[str, str]) -> Topology:
    local_size = int(environ["LOCAL_WORLD_SIZE"])
    return Topology(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_size=local_size,
        cross_rank=int(environ["GROUP_RANK"]),
        # Wrong if nodes have different numbers of workers; hvd.init() then corrects it.
        cross_size=int(environ.get("GROUP_WORLD_SIZE", int(environ["WORLD_SIZE"]) // local_size)),
        host=environ.get("HOSTNAME", "127.0.0.1"),
        job_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        generation=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        master=_master(environ),
        launcher="torchrun",
    )


def _reader_of(
    launcher: str, rank: str, size: str, local_rank: str, local_size: str
) -> Callable[[Mapping[str, str]], Topology]:
    """A reader for launchers that set the local indices, but none over the hosts.

    The latter are guessed, correctly if ranks are assigned to equal hosts in blocks or in turns; ``hvd.init()``
    corrects them.
    """

    def read(environ: Mapping[str, str]) -> Topology:
        index, workers = int(environ[rank]), int(environ[size])
        local_index, here = int(environ[local_rank]), int(environ[local_size])
        hosts = -(-workers // here)
        return Topology(
            rank=index,
            size=workers,
            local_rank=local_index,
            local_size=here,
            cross_rank=index // here if index % here == local_index else index % hosts,
            cross_size=hosts,
            host=environ.get("HOSTNAME", "127.0.0.1"),
            job_id=environ.get("PMIX_NAMESPACE", ""),
            master=_master(environ),
            launcher=launcher,
        )

    return read


def _slurm(environ: Mapping[str, str]) -> Topology:
    tasks = slurm_counts(environ, "SLURM_STEP_TASKS_PER_NODE")
    node, local_rank = int(environ["SLURM_NODEID"]), int(environ["SLURM_LOCALID"])
    peers = [index for index, count in enumerate(tasks) if count > local_rank]
    return Topology(
        rank=int(environ["SLURM_PROCID"]),
        size=sum(tasks),
        local_rank=local_rank,
        local_size=tasks[node],
        cross_rank=peers.index(node),
        cross_size=len(peers),
        host=environ.get("SLURMD_NODENAME", "127.0.0.1"),
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}",
        master=_master(environ),
        launcher="slurm",
    )


def slurm_counts(environ: Mapping[str, str], variable: str) -> list[int]:
    """The tasks of each node, from one of Slurm's variables.

    ``"2(x3),1"`` means three nodes of two tasks and one node of one.

    Raises:
        ValueError: the variable cannot be parsed.
    """
    counts: list[int] = []
    for part in environ[variable].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{variable}={environ[variable]!r} cannot be parsed")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _on_platform(platform: str, rank: str, size: str, master: str, environ: Mapping[str, str]) -> Topology:
    """The topology on a platform, without local indices.

    They are not known before the ranks meet: ``hvd.init()`` finds them.
    """
    return Topology(
        rank=int(rank),
        size=int(size),
        cross_rank=int(rank),
        cross_size=int(size),
        host=environ.get("HOSTNAME", "127.0.0.1"),
        master=master,
        launcher=platform,
    )


def _master(environ: Mapping[str, str]) -> str:
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return join_address(host, int(port)) if host and port else ""


#: The indices of a worker, as Open MPI and LSF name them.
_INDICES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")

#: The variable that identifies a launcher -> the reader of its variables, most specific first.
_READERS: dict[str, Callable[[Mapping[str, str]], Topology]] = {
    "HOROVOD_RANK": _ours,
    "TORCHELASTIC_RUN_ID": _torchrun,
    "OMPI_COMM_WORLD_RANK": _reader_of("openmpi", *(f"OMPI_COMM_WORLD_{index}" for index in _INDICES)),
    "JSM_NAMESPACE_RANK": _reader_of("lsf", *(f"JSM_NAMESPACE_{index}" for index in _INDICES)),
    # Not PMI_RANK: `srun --mpi=pmi2` sets it too, but no local indices.
    "MPI_LOCALRANKID": _reader_of("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM_STEP_TASKS_PER_NODE": _slurm,
}

#: Platforms that give a process its rank, the number of ranks, and an address on the host of rank 0 at which nothing
#: listens yet -> their variables. A process with only some of them is not theirs: programs set MASTER_ADDR themselves.
PLATFORMS = {
    # torch.distributed's "env://" without torchrun's agent: AzureML, Kubeflow's PyTorchJob.
    "torch": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    # A TrainJob of Kubeflow Trainer v2 whose command is not torchrun: one process for each node.
    "trainjob": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    # SageMaker's ModelTrainer whose command is neither torchrun nor mpirun: one process for each host.
    "sagemaker": ("SM_CURRENT_HOST_RANK", "SM_HOST_COUNT", "SM_MASTER_ADDR", "SM_MASTER_PORT"),
}
