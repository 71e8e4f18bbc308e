"""Encrypted connections, on clusters whose own are encrypted."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

from hvd_cluster.data.files.scratch import scratch_folder

#: Any of these says that the cluster's traffic is not for everybody's eyes.
_SETTINGS = ("spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled")
_GLOO = "GLOO_DEVICE_TRANSPORT"

#: What a user should know where tensors are not encrypted although all else is.
OPEN_TENSORS_TEXT = (
    "the launcher's connections are encrypted, as those of Spark are, but tensors between hosts are not: this torch "
    "was built without Gloo's TLS (USE_GLOO_WITH_OPENSSL), and NCCL has none; keep that traffic in a private network"
)


def is_wanted(conf: Callable[[str], str | None]) -> bool:
    """Whether a session whose settings ``conf`` looks up encrypts its own connections."""
    return any((conf(name) or "").lower() == "true" for name in _SETTINGS)


@contextlib.contextmanager
def gloo_variables(certificate: bytes) -> Iterator[dict[str, str]]:
    """The variables by which Gloo's connections are encrypted too, in this context; none where torch cannot.

    Args:
        certificate: the job's, with its key; empty where nothing is to be encrypted.
    """
    if not certificate or not _gloo_has_tls():
        yield {}
        return
    with scratch_folder("tls") as folder:  # only this user can enter it
        path = Path(folder, "job.pem")
        path.write_bytes(certificate)
        files = dict.fromkeys((f"{_GLOO}_TCP_TLS_{part}" for part in ("PKEY", "CERT", "CA_FILE")), str(path))
        yield {_GLOO: "TCP_TLS", **files}


def _gloo_has_tls() -> bool:
    """Told by the library's own text: to ask Gloo itself would mean to load torch into the task's process."""
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for library in (Path(folder, "lib", "libtorch_cpu.so") for folder in folders):
        if library.exists():
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
                return text.find(f"{_GLOO}_TCP_TLS_PKEY".encode()) >= 0
    return False
