"""Tensors in the shared segment, which other ranks use in place, without copies.

Each rank has a region of the segment to allocate from. A region is sparse: it takes memory when something is allocated
in it, and returns it when that is freed. A tensor frees its block with the last reference to its storage, and keeps the
mapping alive until then, also after ``shutdown()``.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque

import torch

from hvd_cluster.errors import SHUT_DOWN_TEXT, WorldEndedError

#: Memory is allocated and returned by the kernel's pages: of 4 KiB on x86-64, of up to 64 KiB on Arm.
_PAGE_BYTES = mmap.PAGESIZE
#: How many views of other ranks' tensors are kept.
_MAX_VIEWS = 1000
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """The regions of all ranks, seen from one rank.

    Args:
        memory: the segment.
        descriptor: the segment's file, for allocation; the arena owns it from here on.
        start: the offset of the regions; a multiple of the page size.
        region_bytes: the size of each region; a multiple of the page size.
        index: this rank's index on the host.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int, start: int, region_bytes: int, index: int) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._first = start + index * region_bytes
        self._end = self._first + region_bytes
        #: (start, length in bytes) of free blocks, in order; adjacent blocks are always joined.
        self._free = [(self._first, region_bytes)]
        #: Blocks of freed tensors. A garbage collection may free one while this very thread holds the lock, so freed
        #: blocks are added here, and the holder of the lock joins them with the free ones.
        self._freed: deque[tuple[int, int]] = deque()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pid = os.getpid()
        self._views: OrderedDict[tuple[int, torch.dtype, int], torch.Tensor] = OrderedDict()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of undefined content in this rank's region.

        Raises:
            MemoryError: the region is full, or the machine is.
            HorovodInternalError: the world has ended; another rank may have left it.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        num_bytes = -(-count * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
        with self._lock:
            if self._descriptor < 0:
                raise WorldEndedError(f"{SHUT_DOWN_TEXT} (its shared memory is gone)")
            self._join_free()
            start = self._take(num_bytes)
            block = (ctypes.c_char * num_bytes).from_buffer(self._memory, start)
        # The storage of the tensor holds the block, and the block holds the mapping.
        weakref.finalize(block, self._free_block, start, num_bytes).atexit = False
        self._settle()
        return torch.frombuffer(block, dtype=dtype, count=count).view(shape)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """A contiguous tensor's offset in the segment; -1 outside this rank's region."""
        offset = tensor.data_ptr() - self._address
        return offset if self._first <= offset < self._end else -1

    def view(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """The segment from ``offset`` on, in any rank's region, as a tensor (count,)."""
        key = (offset, dtype, count)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.popitem(last=False)
            view = self._views[key] = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
        return view

    def close(self) -> None:
        """Release the segment; tensors keep it, but nothing more can be allocated."""
        with self._lock:
            self._views.clear()
            self._free.clear()
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
                del self._memory

    def _take(self, num_bytes: int) -> int:
        """Allocate a block of the region; needs the lock."""
        for position, (start, length) in enumerate(self._free):
            if length < num_bytes:
                continue
            try:
                # Without this a full machine is noticed at the first touch, by SIGBUS.
                os.posix_fallocate(self._descriptor, start, num_bytes)
            except OSError as error:
                raise MemoryError(f"{num_bytes} bytes of shared memory cannot be allocated: {error}") from error
            self._free[position : position + 1] = [(start + num_bytes, length - num_bytes)][: length > num_bytes]
            return start
        raise MemoryError(
            f"{num_bytes} bytes of shared memory cannot be allocated: this rank's region of {self._end - self._first} "
            "bytes is full or fragmented. HOROVOD_SHARED_MEMORY_REGION_MB sets its size"
        )

    def _free_block(self, start: int, num_bytes: int) -> None:
        if os.getpid() != self._pid:
            return  # freed in a forked child; the memory is the parent's
        self._freed.append((start, num_bytes))
        self._settle()

    def _settle(self) -> None:
        """Join freed blocks, or leave that to the thread that holds the lock."""
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._join_free()
            finally:
                self._lock.release()

    def _join_free(self) -> None:
        """Join freed blocks with the free ones; needs the lock."""
        while self._freed:
            start, num_bytes = self._freed.popleft()
            if self._descriptor < 0:
                continue
            _libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(num_bytes))
            joined: list[tuple[int, int]] = []
            for begin, length in sorted([*self._free, (start, num_bytes)]):
                if joined and joined[-1][0] + joined[-1][1] == begin:
                    joined[-1] = (joined[-1][0], joined[-1][1] + length)
                else:
                    joined.append((begin, length))
            self._free = joined
