"""A driver whose session encrypts its connections: ``encrypted.py KIND FOLDER`` writes FOLDER/result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins"))

from spark_sessions import session

import hvd_cluster.spark


def look() -> list[object]:
    """A sum over the ranks, and whether the job's store greets strangers with a certificate or with our own bytes."""
    import contextlib
    import os
    import socket
    import ssl

    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    address = (os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    handshake = b""
    with socket.create_connection(address, timeout=5) as plain:
        plain.settimeout(1)
        with contextlib.suppress(TimeoutError):  # a server of TLS waits for its client
            handshake = plain.recv(100)
    certificate = ssl.get_server_certificate(address)
    return [total, handshake.decode(), "BEGIN CERTIFICATE" in certificate, os.environ.get("GLOO_DEVICE_TRANSPORT", "")]


if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    Path(folder, "spark").mkdir()
    with session(kind, Path(folder, "spark"), {"spark.ssl.enabled": True}):
        found = [hvd_cluster.spark.run(look, num_proc=2), hvd_cluster.spark.run_elastic(look, num_proc=2)]
        Path(folder, "result").write_text(json.dumps(found))
