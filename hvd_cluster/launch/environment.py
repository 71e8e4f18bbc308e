"""The environment that a worker starts with: the rules of all launchers.

The user's settings have priority: a variable given to the launcher overrides everything, an argument such as ``nics``
overrides what the launcher finds by itself, and a thread count or NCCL_SOCKET_IFNAME in the environment is kept.
"""

from __future__ import annotations

import logging
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvd_cluster.oldpaths.shim import other_entries, shim_env
from hvd_cluster.rendezvous.addresses import interface_names
from hvd_cluster.topology import Topology, export, inherited_env, is_job_variable

logger = logging.getLogger(__name__)

#: Variables that describe the launcher's own host, shell or login.
_OF_THIS_HOST = frozenset(
    [
        *("_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER"),
        *("WINDOWID", "XAUTHORITY"),
    ]
)
_OF_THIS_HOST_PREFIXES = ("BASH_FUNC_", "DBUS_", "SSH_", "XDG_")
#: Of the XDG variables these are settings, such as a cache outside of a small home folder; others are of a login.
_XDG_FOLDER = re.compile(r"XDG_(CACHE|CONFIG|DATA|STATE)_HOME")


def worker_environment(
    topology: Topology, env: Mapping[str, str | None], *, as_horovod: bool | None = None
) -> dict[str, str]:
    """This process's environment plus the worker's topology plus ``env``.

    None removes a variable. If this process is itself a worker of a job, its own topology is not inherited.

    Args:
        as_horovod: whether ``import horovod`` works in the worker; None means as in this process.
    """
    variables = {name: value for name, value in inherited_env().items() if not is_job_variable(name)}
    variables.update(thread_variables(variables, topology.local_size))
    variables["PYTHONUNBUFFERED"] = "1"
    variables.update(topology.to_env())
    for name, value in env.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    # Last, because on another host ``env`` has the launcher's PYTHONPATH, which may not contain the package there.
    variables.update(python_path(variables.get("PYTHONPATH", "")))
    variables.update(_startup_path(variables.get("PYTHONPATH", "")))
    return {**variables, **shim_env(variables, wanted=as_horovod)}


def interface_variables(nics: str | Iterable[str] | None) -> dict[str, str]:
    """The variables that make workers use a network interface of ``nics``.

    Empty for None. Gloo uses the first interface, NCCL any of them.
    """
    names = interface_names(nics)
    if len(names) > 1:
        logger.warning("of nics=%s Gloo uses only %s", ",".join(names), names[0])
    return {"HOROVOD_GLOO_IFACE": names[0], "NCCL_SOCKET_IFNAME": ",".join(names)} if names else {}


def found_interface_variables(
    interface: str, environ: Mapping[str, str], env: Mapping[str, str | None]
) -> dict[str, str]:
    """The variables for an interface that the launcher has found.

    They do not override the user's own.

    Args:
        environ: the environment that workers inherit, whose NCCL_SOCKET_IFNAME is kept.
    """
    kept = {*env, *(["NCCL_SOCKET_IFNAME"] if environ.get("NCCL_SOCKET_IFNAME") else [])}
    return {name: value for name, value in interface_variables(interface).items() if name not in kept}


def thread_variables(environ: Mapping[str, str], local_size: int) -> dict[str, str]:
    """The number of threads of a worker's numeric libraries.

    It is an equal share of the CPUs unless ``environ`` sets it.

    Args:
        environ: the environment that the worker would get otherwise.
    """
    if environ.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // local_size))}


def exportable(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment for workers on other hosts. Pure."""
    return {
        name: value
        for name, value in environ.items()
        if _XDG_FOLDER.fullmatch(name)
        or not (name in _OF_THIS_HOST or name.startswith(_OF_THIS_HOST_PREFIXES) or is_job_variable(name))
    }


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent needs to import this package in an empty environment."""
    present = environ.get("PYTHONPATH", "")
    return {**({"PYTHONPATH": present} if present else {}), **python_path(present)}


def python_path(present: str) -> dict[str, str]:
    """Make this package importable where it is not installed.

    It comes from a checkout, or from a zip file on Spark.

    Args:
        present: the PYTHONPATH that the process would get otherwise.
    """
    root = str(Path(__file__).parents[2])
    if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} or root in present.split(os.pathsep):
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (present, root) if part)}


def enable_horovod_import() -> None:
    """Make ``import horovod`` work in this process and in its child processes.

    Others may have launched this process.
    """
    import hvd_cluster.compat  # noqa: F401 - its import is what makes horovod resolve

    export(shim_env(inherited_env(), wanted=True))


def _startup_path(present: str) -> dict[str, str]:
    """Make Python run ``startup/sitecustomize.py`` in workers and their children.

    It runs when the process starts. The directory comes last, so that a sitecustomize of the user's has priority.
    """
    folder = str(Path(__file__).with_name("startup"))
    return {"PYTHONPATH": os.pathsep.join([*other_entries(present, folder), folder])}
