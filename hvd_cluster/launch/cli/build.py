"""The report of ``--check-build``: what works here.

It lists the frameworks, controllers and operations.
"""

from __future__ import annotations

import importlib.util

from hvd_cluster.oldpaths.table import HOROVOD_VERSION
from hvd_cluster.version import __version__

#: Displayed name -> the framework's module, and our module for it.
_FRAMEWORKS = {
    "TensorFlow": ("tensorflow", "hvd_cluster.tensorflow"),
    "PyTorch": ("torch", "hvd_cluster.torch"),
    "MXNet": ("mxnet", "hvd_cluster.mxnet"),
}


def check_build(verbose: bool = False) -> str:  # noqa: ARG001 - Horovod's signature
    """Print and return what ``hvdrun --check-build`` shows."""
    report = build_report()
    print(report, end="")
    return report


def build_report() -> str:
    """The report, in the format that programs which parse Horovod's report expect."""
    frameworks = {name: all(map(_exists, modules)) for name, modules in _FRAMEWORKS.items()}
    controllers = {"MPI": False, "Gloo": _torch_has("Gloo")}
    operations = {"NCCL": _torch_has("NCCL"), "DDL": False, "CCL": False, "MPI": False, "Gloo": _torch_has("Gloo")}
    sections = {
        "Available Frameworks": frameworks,
        "Available Controllers": controllers,
        "Available Tensor Operations": operations,
    }
    lines = [f"hvd_cluster v{__version__}, with the interface of", f"Horovod v{HOROVOD_VERSION}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in entries.items()]
    return "\n".join(lines) + "\n"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _torch_has(backend: str) -> bool:
    """Whether this build of torch has the process group.

    Importing torch takes seconds, so it happens only here.
    """
    try:
        import torch
    except ImportError:
        return False
    return hasattr(
        getattr(torch._C, "_distributed_c10d", None), f"ProcessGroup{backend.upper().replace('GLOO', 'Gloo')}"
    )
