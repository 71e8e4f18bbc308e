"""What ``horovod.common`` offers: build questions, an object of basics, helpers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from hvd_cluster.engine import basics
from hvd_cluster.engine.fusion import split_evenly
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.errors import HorovodVersionMismatchError
from hvd_cluster.topology import export

T = TypeVar("T")

_FRAMEWORKS = {"torch": "torch", "tensorflow": "tensorflow", "mxnet": "mxnet", "keras": "keras"}
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)[-_.]?(\d*))?.*", re.IGNORECASE)


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for a ``with`` block only; None leaves one as it is."""
    before = export({name: str(value) for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        export(before)


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature, here and below
    """True: torch brings Gloo."""
    return basics.gloo_built()


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """False: nothing here runs on MPI."""
    return basics.mpi_built()


def nccl_built(verbose: bool = False) -> int:  # noqa: ARG001
    """NCCL's version in this build of torch, as 22703 for 2.27.3; 0 without NCCL."""
    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """False: there is no DDL."""
    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """False: there is no oneCCL."""
    return basics.ccl_built()


def cuda_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether torch is built for CUDA."""
    return basics.cuda_built()


def rocm_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether torch is built for ROCm."""
    return basics.rocm_built()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Whether a framework ("torch", "tensorflow", "mxnet", "keras") is installed."""
    return find_spec(_FRAMEWORKS.get(ext_base_name, ext_base_name)) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework can be used, and this process has a GPU."""
    import torch

    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:  # noqa: ARG001
    """Do nothing if the framework of ``ext_name`` (as "horovod.torch") is installed.

    Raises:
        ImportError: it is not.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs {_FRAMEWORKS.get(framework, framework)}, which is not installed")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: no framework was built against."""


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What a HorovodVersionMismatchError of these says."""
    return str(HorovodVersionMismatchError(name, version, installed_version))


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is at least another one, such as "2.13.0+cpu" and "2.4.0".

    Raises:
        ValueError: one of them is not text that begins with numbers and dots.
    """
    return _version_key(ver) >= _version_key(target)


def _version_key(version: str) -> tuple[tuple[int, ...], bool, int]:
    """Numbers, whether it is a final release, and the number of the pre-release."""
    found = _VERSION.fullmatch(str(version))
    if found is None:
        raise ValueError(f"{version!r} is not a version such as '2.4.0'")
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), found[2] is None, int(found[3] or 0)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two, as Adasum wants it."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's signature
    """``n`` parts of a list, in order, longer ones first; sizes differ by 1 at most."""
    return split_evenly(l, n)


def is_iterable(x: Any) -> bool:
    """Whether ``x`` can be iterated."""
    return isinstance(x, Iterable)


class HorovodBasics:
    """The functions of :mod:`hvd_cluster.engine.basics` as methods.

    Args:
        pkg_path: accepted, like what follows: there is no compiled library to find.
    """

    Average, Sum, Adasum, Min, Max, Product = (
        ReduceOp(0),
        ReduceOp(1),
        ReduceOp(2),
        ReduceOp(3),
        ReduceOp(4),
        ReduceOp(5),
    )

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    rank = staticmethod(basics.rank)
    size = staticmethod(basics.size)
    local_rank = staticmethod(basics.local_rank)
    local_size = staticmethod(basics.local_size)
    cross_rank = staticmethod(basics.cross_rank)
    cross_size = staticmethod(basics.cross_size)
    start_timeline = staticmethod(basics.start_timeline)
    stop_timeline = staticmethod(basics.stop_timeline)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)

    def __init__(self, pkg_path: str | None = None, *args: Any) -> None:
        del pkg_path, args

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """The ranks of every process set by its id; the global one has id 0."""
        return {number: list(ranks) for number, ranks in sorted(basics.engine().process_sets.items())}


#: The one that the modules of operations have.
_basics = HorovodBasics()


def _temp_process_set_object(process_set_id: int) -> ProcessSet:
    """A process set by its id, for operations that know no more of it.

    Raises:
        ValueError: none of that id is registered.
    """
    if process_set_id == 0:
        return global_process_set
    ranks = basics.engine().process_sets.get(process_set_id)
    if ranks is None:
        raise ValueError(f"process set {process_set_id} does not exist or has not been registered")
    found = ProcessSet(ranks)
    found.process_set_id = process_set_id
    return found
