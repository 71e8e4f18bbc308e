"""An S3 server on localhost: the fixtures ``endpoint`` (its address) and ``bucket`` (a fresh URL)."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server, and the address that it answers at."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline_s = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None, "the server ended"
                    assert time.monotonic() < deadline_s, "the server did not answer"
                    time.sleep(0.1)
            yield url
        finally:
            server.kill()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh URL; the AWS variables lead to the server."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    import pyarrow.fs

    s3 = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True, allow_bucket_deletion=True)
    s3.create_dir("bucket")
    s3.delete_dir_contents("bucket")
    return "s3://bucket/work"
