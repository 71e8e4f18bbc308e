"""send and recv between two ranks, with tags, in any order, and from any source."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_cluster.launch import local


def test_send_and_receive_in_both_directions_with_tags(trio: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        rank, size = dist.get_rank(), dist.get_world_size()
        to, source = (rank + 1) % size, (rank - 1) % size
        first, second = torch.empty(3), torch.empty(2, 2)
        works = [
            dist.isend(torch.full((2, 2), 10.0 + rank), to, tag=2),
            dist.isend(torch.full((3,), float(rank)), to, tag=1),
            dist.irecv(first, source, tag=1),
            dist.irecv(second, source, tag=2),
        ]
        for work in works:
            work.wait()
        return [float(first[2]), float(second[1, 1])]

    assert trio(fn) == [[2.0, 12.0], [0.0, 10.0], [1.0, 11.0]]


def test_messages_of_one_pair_arrive_in_order(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> list[float]:
        import torch

        if dist.get_rank() == 0:
            for work in [dist.isend(torch.full((300_000,), float(number)), 1) for number in range(6)]:
                work.wait()
            return []
        tensors = [torch.empty(300_000) for _ in range(6)]
        for tensor in tensors:
            dist.recv(tensor, 0)
        return [float(tensor[-1]) for tensor in tensors]

    assert pair(fn)[1] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_receive_from_any_source_takes_each_message_once(four: Any) -> None:
    def fn(dist: Any, gloo: Any) -> Any:
        import torch

        rank, size = dist.get_rank(), dist.get_world_size()
        if rank == 0:
            found = []
            for _ in range(2 * (size - 1)):
                tensor = torch.empty(2)
                source = dist.recv(tensor, tag=5)
                found.append((source, tensor.tolist()))
            last = torch.empty(2)
            dist.recv(last, 2, tag=6)
            return sorted(found), last.tolist()
        for number in range(2):
            dist.send(torch.tensor([float(rank), float(number)]), 0, tag=5)
        if rank == 2:
            dist.send(torch.tensor([9.0, 9.0]), 0, tag=6)
        return None

    found, last = four(fn)[0]
    assert last == [9.0, 9.0]
    assert found == [(source, [float(source), float(number)]) for source in (1, 2, 3) for number in range(2)]


@pytest.mark.slow
def test_a_receive_from_any_source_is_late_only_while_a_caller_waits_for_it() -> None:
    def fn() -> tuple[str, str, list[float]]:
        import logging
        import time

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        texts: list[str] = []
        handler = logging.Handler()
        vars(handler)["emit"] = lambda record: texts.append(record.getMessage())
        logging.getLogger("hvd_cluster").addHandler(handler)
        dist.init_process_group("hvd")
        rank, found = dist.get_rank(), []
        for sender, delay_s in ((1, 0.0), (2, 4.0)):
            tensor = torch.zeros(1)
            if rank == 0:
                dist.recv(tensor)
                found.append(float(tensor[0]))
            elif rank == sender:
                time.sleep(delay_s)
                dist.send(torch.full((1,), float(rank)), 0)
            if sender == 1:
                for _ in range(20):  # while the receive from rank 2 is still under way
                    time.sleep(0.5)
                    dist.barrier()
                early = "".join(texts)
        dist.barrier()
        return early, "".join(texts), found

    env = {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8",
    }
    early, late, found = local.run(fn, num_proc=3, env=env)[0]
    assert "send" not in early
    assert "send 2 to 0" in late
    assert found == [1.0, 2.0]


@pytest.mark.slow
def test_a_receive_that_no_rank_sends_to_ends_the_world_after_the_timeout() -> None:
    def fn(is_directed: bool) -> tuple[str, float]:
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import hvd_cluster.torch  # noqa: F401 - registers the backend

        dist.init_process_group("hvd", timeout=timedelta(seconds=4))
        tensor = torch.ones(1)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
            time.sleep(15)
            return "", 0.0
        dist.recv(tensor)
        time.sleep(5)  # no receive waits meanwhile
        work = dist.irecv(tensor, 0 if is_directed else None)
        begun_s = time.monotonic()
        while not work.is_completed() and time.monotonic() < begun_s + 9:
            time.sleep(0.1)
        return str(work.exception()), time.monotonic() - begun_s

    for is_directed in (False, True):
        text, waited_s = local.run(fn, (is_directed,), num_proc=2, env={"OMP_NUM_THREADS": "1"})[1]
        assert "the timeout of the call, for other ranks to call" in text
        assert 3 < waited_s < 8


def test_a_batch_of_sends_and_receives(pair: Any) -> None:
    def fn(dist: Any, gloo: Any) -> float:
        import torch

        rank = dist.get_rank()
        tensor = torch.empty(4)
        batch = [
            dist.P2POp(dist.irecv, tensor, 1 - rank),
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return float(tensor[0])

    assert pair(fn) == [1.0, 0.0]
