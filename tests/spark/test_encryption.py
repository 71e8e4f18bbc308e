"""On a cluster that encrypts, so do we. The session has a driver process of its own, for its settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cluster.rendezvous.secret import certificate_of, new_secret
from hvd_cluster.spark import encryption

PROGRAM = Path(__file__).parent / "programs" / "encrypted.py"


@pytest.mark.slow
@pytest.mark.spark("local", "connect")
def test_where_spark_encrypts_the_workers_connections_are_encrypted_too(spark_master: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), spark_master, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    fixed, elastic = json.loads((tmp_path / "result").read_text())
    # Of each rank: the sum; not a word to strangers; a certificate. Within one host Gloo is left as it is.
    assert fixed == [[3.0, "", True, ""]] * 2
    assert [each[:3] for each in elastic] == [each[:3] for each in fixed]


@pytest.mark.parametrize("name", ["spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled"])
def test_the_settings_of_spark_decide(name: str) -> None:
    assert encryption.is_wanted({name: "true"}.get)
    assert not encryption.is_wanted({name: "false"}.get)
    assert not encryption.is_wanted({}.get)


def test_gloo_gets_the_certificate_only_where_torch_has_its_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = certificate_of(new_secret(encrypted=True))
    with encryption.gloo_variables(b"") as variables:
        assert variables == {}
    monkeypatch.setattr(encryption, "_gloo_has_tls", lambda: True)
    with encryption.gloo_variables(certificate) as variables:
        assert variables["GLOO_DEVICE_TRANSPORT"] == "TCP_TLS"
        files = {Path(variables[f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{part}"]) for part in ("PKEY", "CERT", "CA_FILE")}
        assert [file.read_bytes() for file in files] == [certificate]
        assert all(file.parent.stat().st_mode & 0o077 == 0 for file in files)
    assert not any(file.exists() for file in files)


def test_whether_torch_has_glos_tls_is_what_torch_itself_says() -> None:
    code = (
        "import torch.distributed as dist\n"
        "try: dist.ProcessGroupGloo.create_device(hostname='127.0.0.1')\n"
        "except RuntimeError as error: print(error)\n"
    )
    with encryption.gloo_variables(b"") as none:
        assert none == {}
    certificate = certificate_of(new_secret(encrypted=True))
    file = "/nonexistent/job.pem"
    environ = {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    environ |= {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{part}": file for part in ("PKEY", "CERT", "CA_FILE")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    with encryption.gloo_variables(certificate) as variables:
        # Without it torch does not know the name; with it, it misses the file.
        assert ("nsupported gloo device" in done.stdout + done.stderr) == (not variables)
