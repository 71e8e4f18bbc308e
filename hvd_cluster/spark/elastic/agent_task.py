"""The task of an elastic job: a host with one slot, until it is released.

The driver releases it. It runs the launcher's own agent (:mod:`hvd_cluster.launch.agent`), which starts the worker as a
child of this process.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.agent import Agent
from hvd_cluster.rendezvous.secret import certificate_of
from hvd_cluster.rendezvous.sockets import detect_dead_host
from hvd_cluster.spark.devices import task_environment, task_gpus
from hvd_cluster.spark.driver_connection import reach_driver
from hvd_cluster.spark.encryption import gloo_variables
from hvd_cluster.spark.messages import Versions, disagreements


@dataclass(frozen=True, kw_only=True)
class ElasticTaskPlan:
    """What the driver sends to every task of an elastic job."""

    #: The job's secret; it is part of the pickled task and is never shown.
    secret: bytes = field(repr=False)
    #: "host:port" candidates for the driver's listener.
    driver_addresses: tuple[str, ...]
    #: The driver's versions.
    versions: Versions
    #: Names, or prefixes of names, of the network interfaces to use; if empty, a probe decides.
    interfaces: tuple[str, ...] = ()


def perform(context: Any, versions: dict[str, str], plan: bytes, slot: int) -> list[tuple[int, str, bytes]]:
    """Serve the driver until it releases this task or is gone.

    Args:
        versions: the driver's versions, in a form that every version can read.

    Returns:
        Nothing; or why this task cannot be used, as one row of kind "problem".
    """
    here = socket.gethostname()
    errors, _ = disagreements(Versions(**versions), {here: Versions.here()})
    if errors:
        return [(slot, "problem", "; ".join(errors).encode())]
    job: ElasticTaskPlan = pickle.loads(plan)  # trusted: Spark sent it together with this function
    channel, _ = reach_driver(job.driver_addresses, job.secret, detect_dead_host)
    if channel is None:
        text = (
            f"the task on {here} cannot reach the driver at {', '.join(job.driver_addresses)}. The process that called "
            "run_elastic controls the job: open its ports to the executors, or call it on a machine that they reach "
            "(with a remote Spark Connect server, one in the cluster's network)"
        )
        return [(slot, "problem", text.encode())]
    gpus = task_gpus(context)
    env: dict[str, str | None] = {**task_environment(gpus)}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    with (
        gloo_variables(certificate_of(job.secret)) as variables,
        contextlib.suppress(EOFError, OSError, AuthenticationError),
        contextlib.closing(channel),
    ):
        # Another attempt of this task gets another name, because it counts as another host.
        name = f"{here}/task-{slot}-{secrets.token_hex(3)}"
        Agent(channel, {**env, **variables}, owns_devices=bool(gpus)).serve(name, job.secret, job.interfaces)
    return []
