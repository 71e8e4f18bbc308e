"""The allocator of shared tensors, without ranks: no two live tensors overlap, whenever the others are freed."""

import mmap
import os
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from hvd_cluster.engine.shared_memory.arena import Arena

PAGE_BYTES = mmap.PAGESIZE
NUM_PAGES = 64


@pytest.fixture
def arena() -> Iterator[Arena]:
    descriptor = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, NUM_PAGES * PAGE_BYTES)
    arena = Arena(mmap.mmap(descriptor, 0), descriptor, 0, NUM_PAGES * PAGE_BYTES, 0)
    yield arena
    arena.close()


def test_all_of_a_region_can_be_used_again_and_again(arena: Arena) -> None:
    for _ in range(3):
        tensors = [arena.empty((1024,), torch.float32) for _ in range(NUM_PAGES)]
        with pytest.raises(MemoryError, match="full or fragmented"):
            arena.empty((1,), torch.uint8)
        random.Random(1).shuffle(tensors)
        tensors.clear()
        assert arena.offset_of(arena.empty((NUM_PAGES * PAGE_BYTES,), torch.uint8)) == 0


def test_memory_is_given_back_when_a_tensor_goes(arena: Arena) -> None:
    blocks = lambda: os.fstat(arena._descriptor).st_blocks  # noqa: E731
    tensor = arena.empty((8 * PAGE_BYTES,), torch.uint8).fill_(1)
    assert blocks() == 8 * PAGE_BYTES // 512
    view = tensor[5:6]
    del tensor
    assert view.item() == 1
    assert blocks()
    del view
    assert blocks() == 0


def test_what_is_freed_in_mid_allocation_is_not_given_out_twice(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may come at any moment, and free tensors in the very thread that allocates one."""
    allocate = os.posix_fallocate
    doomed = [arena.empty((PAGE_BYTES,), torch.uint8)]
    live = [arena.empty((PAGE_BYTES,), torch.uint8)]

    def collect_and_allocate(descriptor: int, offset: int, length: int) -> None:
        doomed.clear()
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", collect_and_allocate)
    live += [arena.empty((PAGE_BYTES,), torch.uint8) for _ in range(3)]
    starts = [arena.offset_of(tensor) for tensor in live]
    assert sorted(set(starts)) == sorted(starts)
    assert 0 in starts  # what was freed is used again
    live.clear()
    assert arena.offset_of(arena.empty((NUM_PAGES * PAGE_BYTES,), torch.uint8)) == 0


@pytest.mark.long
def test_threads_allocate_and_free_at_once(arena: Arena) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        order = random.Random(mark)
        live: list[torch.Tensor] = []
        for _ in range(1500):
            if len(live) > 5:
                live.pop(order.randrange(len(live)))
            live.append(arena.empty((order.randint(1, 2) * PAGE_BYTES,), torch.uint8).fill_(mark))
            wrong.extend(1 for tensor in live if not bool((tensor == mark).all()))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.offset_of(arena.empty((NUM_PAGES * PAGE_BYTES,), torch.uint8)) == 0
