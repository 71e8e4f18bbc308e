"""Tensors on a GPU: NCCL with one rank, the engine's own stream, and two ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_cluster.launch import local

pytestmark = pytest.mark.gpu
ENV = {"OMP_NUM_THREADS": "1"}


def test_nccl_with_one_rank_carries_out_every_collective() -> None:
    def fn() -> list[Any]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.engine.signature import ReduceOp
        from hvd_cluster.engine.transports.alone import AloneTransport
        from hvd_cluster.engine.transports.nccl import NcclTransport
        from hvd_cluster.rendezvous.client import KeyValueClient
        from hvd_cluster.rendezvous.secret import new_secret
        from hvd_cluster.rendezvous.server import KeyValueServer

        hvd.init()
        device = torch.device("cuda", 0)
        secret = new_secret()
        server = KeyValueServer(secret)
        client = KeyValueClient(f"127.0.0.1:{server.port}", secret)
        transport = NcclTransport(
            client, "test/", index=0, ranks=(0,), device=device, host_transport=AloneTransport(torch.device("cpu"), 0)
        )
        buffer = torch.arange(8.0, device=device)
        transport.allreduce(buffer, ReduceOp.SUM).result()
        output = torch.zeros(32, dtype=torch.uint8, device=device)
        transport.allgather(output, buffer.view(torch.uint8)).result()
        moved = torch.zeros(32, dtype=torch.uint8, device=device)
        transport.alltoall(moved, buffer.view(torch.uint8), [32], [32]).result()
        transport.broadcast(moved, 0).result()
        torch.cuda.synchronize()
        results = [tensor.view(torch.float32).tolist() for tensor in (buffer, output, moved)]
        transport.close()
        client.close()
        server.close()
        hvd.shutdown()
        return results

    (results,) = local.run(fn, num_proc=1, env=ENV)
    assert results == [[float(i) for i in range(8)]] * 3


def test_two_ranks_share_one_gpu_over_gloo() -> None:
    def fn() -> list[Any]:
        import hvd_cluster.torch as hvd

        hvd.init()
        torch.cuda.set_device(0)
        mine = torch.full((1 << 16,), float(hvd.rank() + 1), device="cuda")
        total = hvd.allreduce(mine, op=hvd.Sum)
        rows = hvd.allgather(mine[: hvd.rank() + 1])
        sent = hvd.broadcast(mine[:4], root_rank=1)
        model = torch.nn.Linear(64, 64).cuda()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((8, 64), float(hvd.rank()), device="cuda")).square().mean().backward()
            optimizer.step()
        weights = model.weight.detach().cpu()
        hvd.shutdown()
        return [total.unique().tolist(), rows.tolist(), sent.tolist(), weights]

    first, second = local.run(fn, num_proc=2, env=ENV)
    assert first[:3] == second[:3] == [[3.0], [1.0, 2.0, 2.0], [2.0] * 4]
    assert torch.equal(first[3], second[3])
