"""How an NCCL transport ends; the process group is a fake, so that it runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvd_cluster.engine.signature import ReduceOp
from hvd_cluster.engine.transports.alone import AloneTransport
from hvd_cluster.engine.transports.nccl import NcclTransport
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer


class Work:
    """NCCL's: the GPU is done with it some looks after it was launched."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def wait(self) -> None:
        """The host does not wait."""

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Group:
    """Notes how it ends."""

    class Options:
        """As torch's."""

    def __init__(self, *_: Any) -> None:
        self.work = Work(3)
        self.ends: list[Any] = []

    def allreduce(self, *_: Any) -> Work:
        return self.work

    def shutdown(self) -> None:
        self.ends.append(("shutdown", self.work.looks < 0))

    def abort(self) -> None:
        self.ends.append("abort")


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclTransport]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    secret = new_secret()
    with KeyValueServer(secret, "127.0.0.1") as server:
        client = KeyValueClient(f"127.0.0.1:{server.port}", secret)
        yield NcclTransport(
            client,
            "test/",
            index=0,
            ranks=(0, 1),
            device=torch.device("cuda", 0),
            host_transport=AloneTransport(torch.device("cpu"), 0),
            timeout_s=0.2,
        )
        client.close()


def test_the_end_waits_until_the_gpu_is_done(transport: NcclTransport) -> None:
    group = transport._group
    assert transport.is_idle
    transport.allreduce(torch.ones(1), ReduceOp.SUM).result()
    assert not transport.is_idle
    transport.close()
    assert group.ends == [("shutdown", True)]


def test_what_a_gpu_does_not_finish_is_broken_off_with_a_line(
    transport: NcclTransport, caplog: pytest.LogCaptureFixture
) -> None:
    group = transport._group
    group.work = Work(float("inf"))
    transport.allreduce(torch.ones(1), ReduceOp.SUM)
    transport.close()
    assert group.ends == ["abort"]
    assert "NCCL's work of rank 0 was not done 0.2 s after the last operation" in caplog.text


def test_after_an_abort_nothing_is_waited_for(transport: NcclTransport) -> None:
    group = transport._group
    group.work = Work(float("inf"))
    transport.allreduce(torch.ones(1), ReduceOp.SUM)
    transport.abort()
    transport.close()
    assert group.ends == ["abort"]
