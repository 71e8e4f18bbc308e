"""Encrypts the job's connections on clusters that encrypt their own."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

from hvd_cluster.data.files.scratch import scratch_folder

#: Any of these settings means that the cluster encrypts its traffic.
_SETTINGS = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled")
_GLOO = "GLOO_DEVICE_TRANSPORT"

#: A warning for jobs whose tensors are not encrypted although everything else is.
OPEN_TENSORS_TEXT = (
    "the launcher's connections are encrypted, as those of Spark are, but tensors between hosts are not: this torch "
    "was built without TLS for Gloo (USE_GLOO_WITH_OPENSSL), and NCCL has no TLS; use a private network"
)


def is_wanted(conf: Callable[[str], str | None]) -> bool:
    """Whether a session encrypts its own connections; ``conf`` looks up its settings."""
    return any((conf(name) or "").lower() == "true" for name in _SETTINGS)


@contextlib.contextmanager
def gloo_variables(certificate: bytes) -> Iterator[dict[str, str]]:
    """A context whose variables make Gloo encrypt its connections.

    There are none if torch does not support it.

    Args:
        certificate: the job's certificate with its key; empty for no encryption.
    """
    if not certificate or not _gloo_has_tls():
        yield {}
        return
    with scratch_folder("tls") as folder:  # only this user has access
        path = Path(folder, "job.pem")
        path.write_bytes(certificate)
        files = dict.fromkeys((f"{_GLOO}_TCP_TLS_{part}" for part in ("PKEY", "CERT", "CA_FILE")), str(path))
        yield {_GLOO: "TCP_TLS", **files}


def _gloo_has_tls() -> bool:
    """Whether torch's library contains Gloo's TLS, found by searching its text.

    Asking Gloo would load torch in the task.
    """
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for library in (Path(folder, "lib", "libtorch_cpu.so") for folder in folders):
        if library.exists():
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                return text.find(f"{_GLOO}_TCP_TLS_PKEY".encode()) >= 0
    return False
