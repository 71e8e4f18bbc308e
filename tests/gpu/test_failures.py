"""Ranks that die, stop or come late while GPUs communicate: errors on survivors, a report, and recovery."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch import local

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ENV = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
SCRIPT = Path(__file__).with_name("scripts") / "elastic_train.py"


def start(transport: str) -> Any:
    import hvd_cluster.torch as hvd

    if transport == "nccl":
        os.environ["NCCL_HOSTID"] = str(os.getpid())
    torch.cuda.set_device(0)
    hvd.init()
    return hvd


@pytest.mark.parametrize("num_elements", [1, 50_000_000], ids=["small", "200 MB"])
def test_kill_9_in_mid_operation_is_an_error_on_the_survivor_within_10_s(
    tmp_path: Path, transport: str, num_elements: int
) -> None:
    def fn(start: Any, folder: str, transport: str, num_elements: int) -> None:
        import threading

        hvd = start(transport)
        tensor = torch.ones(num_elements, device="cuda")
        hvd.allreduce_(tensor, name="warm")
        torch.cuda.synchronize()
        if hvd.rank() == 1:
            Path(folder, "killed").write_text(str(time.time() + 0.5))
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                hvd.allreduce_(tensor, name="loop")
                torch.cuda.synchronize()
        except hvd.HorovodInternalError as error:
            told: dict[str, Any] = {"at": time.time(), "text": str(error)}
            hvd.shutdown()
            told["left_after"] = time.time() - told["at"]
            told["can_compute"] = torch.ones(3, device="cuda").sum().item()
            Path(folder, "told").write_text(json.dumps(told))
            raise

    with pytest.raises(WorkerFailedError) as caught:
        local.run(fn, (start, str(tmp_path), transport, num_elements), num_proc=2, env=ENV)
    assert caught.value.rank == 1
    told = json.loads((tmp_path / "told").read_text())
    assert told["at"] - float((tmp_path / "killed").read_text()) < 10
    assert told["left_after"] < 10
    assert told["can_compute"] == 3.0


def test_a_process_can_leave_and_join_again_and_keeps_no_memory_of_the_gpu(transport: str) -> None:
    def fn(start: Any, transport: str) -> Any:
        used = []
        for _ in range(4):
            hvd = start(transport)
            total = hvd.allreduce(torch.ones(1000, device="cuda"), op=hvd.Sum)
            assert total.sum().item() == 2000.0
            del total
            hvd.shutdown()
            torch.cuda.synchronize()  # memory that a stream uses is free when the stream has finished
            gc.collect()
            torch.cuda.empty_cache()
            used.append(torch.cuda.memory_allocated())
        return used

    for used in local.run(fn, (start, transport), num_proc=2, env=ENV):
        assert used == [0] * 4


def test_shutdown_with_launched_work_lets_it_end(transport: str) -> None:
    def fn(start: Any, transport: str) -> float:
        hvd = start(transport)
        tensor = torch.ones(1 << 22, device="cuda")
        hvd.allreduce_(tensor, op=hvd.Sum, name="warm")
        torch.cuda._sleep(200_000_000)
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="last")
        hvd.synchronize(handle)
        hvd.shutdown()
        return tensor.mean().item()

    assert local.run(fn, (start, transport), num_proc=2, env=ENV) == [4.0, 4.0]


def test_a_gpu_that_is_busy_is_named_and_awaited() -> None:
    def fn(start: Any) -> float:
        hvd = start("nccl")
        tensor = torch.ones(4, device="cuda")
        hvd.allreduce_(tensor, op=hvd.Sum, name="warm")
        torch.cuda.synchronize()
        if hvd.rank() == 1:
            for _ in range(100):
                torch.cuda._sleep(200_000_000)  # 10 s in all on a GPU of 2 GHz
        hvd.allreduce_(tensor, op=hvd.Sum, name="awaited")
        result = tensor.mean().item()
        hvd.shutdown()
        return result

    errors = io.StringIO()
    env = {**ENV, "HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    assert local.run(fn, (start,), num_proc=2, env=env, stderr=errors, stdout=errors) == [4.0, 4.0]
    assert "awaited" in errors.getvalue()
    assert "its device is still busy with earlier work" in errors.getvalue()


def test_a_rank_that_is_stopped_in_mid_transfer_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    def fn(start: Any, folder: str) -> str:
        hvd = start("nccl")
        tensor = torch.ones(100_000_000, device="cuda")
        hvd.allreduce_(tensor, name="warm")
        torch.cuda.synchronize()
        if hvd.rank() == 1:
            Path(folder, "pid").write_text(str(os.getpid()))
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {os.getpid()}; sleep 30; kill -CONT {os.getpid()}"])
        try:
            while True:
                hvd.allreduce_(tensor, name="loop")
                torch.cuda.synchronize()
        except hvd.HorovodInternalError as error:
            Path(folder, f"told.{hvd.rank()}").write_text(str(error))
            raise

    env = {**ENV, "HOROVOD_GLOO_TIMEOUT_SECONDS": "4", "HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}
    began_s = time.monotonic()
    with pytest.raises(WorkerFailedError):
        local.run(fn, (start, str(tmp_path)), num_proc=2, env=env)
    assert "loop" in (tmp_path / "told.0").read_text()
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("what", ["ddp", "fsdp2"])
def test_kill_9_in_a_step_of_torch_distributed_is_an_error_on_the_survivor(
    tmp_path: Path, transport: str, what: str
) -> None:
    def fn(start: Any, folder: str, transport: str, what: str) -> None:
        import torch.distributed as dist

        start(transport)
        dist.init_process_group("hvd")
        rank = dist.get_rank()
        net: Any = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
        if what == "ddp":
            net = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.3)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cuda", (2,))
            for layer in net:
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        began_s = 0.0
        try:
            for step in range(1000):
                began_s = time.monotonic()
                if step == 3 and rank == 1:
                    inner = net.module if what == "ddp" else net
                    inner[2].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                net(torch.randn(8, 256, device="cuda")).sum().backward()
                torch.cuda.synchronize()
        except RuntimeError as error:
            Path(folder, str(rank)).write_text(f"{time.monotonic() - began_s:.1f} {error}")
            raise

    with pytest.raises(Exception, match="rank"):
        local.run(fn, (start, str(tmp_path), transport, what), num_proc=2, env=ENV)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert float((tmp_path / "0").read_text().split()[0]) < 10


def test_a_rank_that_dies_before_its_first_operation_on_the_gpu_is_an_error_on_the_other(
    tmp_path: Path, transport: str
) -> None:
    def fn(start: Any, folder: str, transport: str) -> None:
        import threading

        hvd = start(transport)
        hvd.barrier()
        if hvd.rank() == 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(10)
        began_s = time.monotonic()
        try:
            hvd.allreduce(torch.ones(4, device="cuda"), name="first")
        except hvd.HorovodInternalError:
            Path(folder, "told").write_text(str(time.monotonic() - began_s))
            raise

    with pytest.raises(WorkerFailedError):
        local.run(fn, (start, str(tmp_path), transport), num_proc=2, env=ENV)
    assert float((tmp_path / "told").read_text()) < 10


@pytest.mark.parametrize("kind", ["nccl", "shm"])
def test_an_elastic_job_continues_without_a_rank_that_was_killed(tmp_path: Path, kind: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n127.0.0.1:1\n127.0.0.2:1\n")
    line = [sys.executable, "-m", "hvd_cluster.launch.cli.main", "--host-discovery-script", f"cat {hosts}"]
    line += ["-np", "3", "--min-np", "2", sys.executable, str(SCRIPT), str(tmp_path), "150"]
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(line, stdout=log, stderr=log, env={**os.environ, **ENV, "TRANSPORT": kind})
    try:
        deadline_s = time.monotonic() + 120
        while True:
            notes = {path: path.read_text().split() for path in tmp_path.glob("pid.*")}
            victims = [
                path for path, (step, rank, size) in notes.items() if (rank, size) == ("1", "3") and int(step) > 20
            ]
            if victims:
                break
            assert job.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.kill(int(victims[0].name.removeprefix("pid.")), signal.SIGKILL)
        assert job.wait(150) == 0, (tmp_path / "log").read_text()
    finally:
        job.kill()
        job.wait()
    end = json.loads((tmp_path / "end.json").read_text())
    assert set(end["sizes"]) == {3, 2}
    assert end["sizes"][-1] == 2
    assert len(set(end["sums"])) == 1
    assert ("NCCL" in end["transports"]) == (kind == "nccl")
