"""The environment that a worker starts with."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import hvd_cluster
from hvd_cluster.oldpaths.carry import carry
from hvd_cluster.topology import Topology, inherited, is_of_one_job

#: Variables that say something about the launcher's own host, shell or login.
_OF_THIS_HOST = frozenset(
    [
        *("_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER"),
        *("WINDOWID", "XAUTHORITY"),
    ]
)
_OF_THIS_HOST_PREFIXES = ("BASH_FUNC_", "DBUS_", "SSH_", "XDG_")


def worker_environment(
    topology: Topology, env: Mapping[str, str | None], *, as_horovod: bool | None = None
) -> dict[str, str]:
    """This process's environment, with the worker's place on top and ``env`` on top of that (None removes).

    Where this process is itself a worker of a job, nothing of its own place gets into the new one's.

    Args:
        topology: the worker's place.
        env: the user's additions.
        as_horovod: whether ``import horovod`` resolves in the worker; None does as this process does.
    """
    variables = {name: value for name, value in inherited().items() if not is_of_one_job(name)}
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // topology.local_size)))
    variables["PYTHONUNBUFFERED"] = "1"
    variables.update(topology.to_env())
    for name, value in env.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    # Last: on another host ``env`` brings the launcher's PYTHONPATH, which need not lead to the package there.
    variables.update(python_path(variables.get("PYTHONPATH", "")))
    return {**variables, **carry(variables, wanted=as_horovod)}


def exportable(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's environment goes to workers on other hosts. Pure."""
    return {
        name: value
        for name, value in environ.items()
        if not (name in _OF_THIS_HOST or name.startswith(_OF_THIS_HOST_PREFIXES) or is_of_one_job(name))
    }


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent needs that starts in a bare environment: the way to this package, and to what it imports.

    Args:
        environ: the launcher's.
    """
    present = environ.get("PYTHONPATH", "")
    return {**({"PYTHONPATH": present} if present else {}), **python_path(present)}


def python_path(present: str) -> dict[str, str]:
    """Lets a process import this very package where it is not installed: from a checkout, or from a zip on Spark.

    Args:
        present: the PYTHONPATH that it would get otherwise.
    """
    root = str(Path(hvd_cluster.__file__).parents[1])
    if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")} or root in present.split(os.pathsep):
        return {}
    return {"PYTHONPATH": os.pathsep.join(part for part in (present, root) if part)}
