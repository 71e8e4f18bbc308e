"""Process-shared semaphores in shared memory, and a barrier made of them.

Unnamed POSIX semaphores exist in C only, so libc is called through ctypes. They do two things that plain stores through
a memoryview do not: a blocked wait uses no CPU, and a post orders memory. glibc's ``sem_post`` is a release and a
successful ``sem_wait`` an acquire operation, so what a rank has written before its post is visible after the peer's
wait, also on weakly ordered processors (ARM, POWER). Nothing else here is relied on for ordering.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time

from hvd_cluster.engine.shared_memory.deadline import Deadline

#: glibc's sem_t has 32 bytes; each semaphore has its own cache line, so that posts do not disturb each other.
STRIDE_BYTES = 64
#: The offset of a counter in the cache line of a semaphore.
_COUNTER_OFFSET = 56


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


# Posts and tries return at once and keep the interpreter lock, which saves its hand-over. Waits release it.
_quick = ctypes.PyDLL(None, use_errno=True)
_blocking = ctypes.CDLL(None, use_errno=True)
#: glibc 2.30 and later: setting the clock back does not prolong a wait.
_has_clockwait = hasattr(_blocking, "sem_clockwait")


def _wait_until(address: ctypes.c_void_p, period_s: float) -> int:
    """Wait ``period_s`` seconds at most to lower a semaphore; 0, or errno says why."""
    clock = time.CLOCK_MONOTONIC if _has_clockwait else time.CLOCK_REALTIME
    until_s = time.clock_gettime(clock) + period_s
    deadline = ctypes.byref(_Timespec(int(until_s), int(until_s % 1 * 1e9)))
    if _has_clockwait:
        return int(_blocking.sem_clockwait(address, clock, deadline))
    return int(_blocking.sem_timedwait(address, deadline))


class Semaphores:
    """An array of semaphores in a mapping that several processes share.

    A wait first tries for a while and then blocks. How long it tries adapts to earlier waits, as in glibc's adaptive
    mutexes: waking a blocked thread costs far more than most waits between ranks last, and a rank that waits long
    should not use a core that others need.

    Args:
        memory: the mapping; the array begins at ``offset`` and takes ``count * STRIDE_BYTES`` bytes.
        offset: where it begins; a multiple of ``STRIDE_BYTES``.
        count: how many.
        create: True in the one process that initialises them, before any other uses them.
        max_tries: how often a wait tries before it blocks; 0 if ranks outnumber cores.
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int, *, create: bool, max_tries: int = 0) -> None:
        # The view keeps the mapping from being closed under the addresses.
        self._view = (ctypes.c_char * (count * STRIDE_BYTES)).from_buffer(memory, offset)
        self._base = ctypes.addressof(self._view)
        self._addresses = [ctypes.c_void_p(self._base + index * STRIDE_BYTES) for index in range(count)]
        self._max_tries = max_tries
        self._typical_tries = 0
        if create:
            for address in self._addresses:
                if _quick.sem_init(address, 1, 0):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self, index: int) -> None:
        """Raise semaphore ``index`` by one."""
        if _quick.sem_post(self._addresses[index]):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def wait(self, index: int, deadline: Deadline) -> None:
        """Lower semaphore ``index`` by one; waits for a raise, or until ``deadline``."""
        address, try_wait = self._addresses[index], _quick.sem_trywait
        if not try_wait(address):
            return
        if self._max_tries:
            limit = min(self._max_tries, 2 * self._typical_tries + 20)
            for tries in range(limit):
                if not try_wait(address):
                    self._typical_tries += (tries - self._typical_tries) // 8
                    return
            self._typical_tries += (limit - self._typical_tries) // 8
        deadline.start()
        while True:
            if not _wait_until(address, deadline.period_s):
                return
            if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            deadline.check()  # also after a signal: those of a profiler come more often than any period ends

    def counter(self, index: int) -> ctypes.c_uint64:
        """A counter beside semaphore ``index``, 0 at first, written by one process.

        It is valid as long as this array.
        """
        return ctypes.c_uint64.from_address(self._base + index * STRIDE_BYTES + _COUNTER_OFFSET)

    def release(self) -> None:
        """Release the mapping; no method may be called afterwards."""
        self._addresses.clear()
        del self._view


class Barrier:
    """A dissemination barrier (Hensgen, Finkel and Manber, 1988).

    It takes ceil(log2 n) rounds of one post and one wait each. In round k rank i posts to rank i + 2^k and waits for
    rank i - 2^k. Each rank and round has its own semaphore, and a semaphore counts, so a rank that is already in the
    next barrier cannot be mistaken for one in this barrier.

    Args:
        semaphores: at least :meth:`num_semaphores` of them, from ``first`` on.
        first: the first one.
        index: this rank.
        num_ranks: all of them.
    """

    def __init__(self, semaphores: Semaphores, first: int, index: int, num_ranks: int) -> None:
        self._semaphores = semaphores
        distances = [1 << k for k in range((num_ranks - 1).bit_length())]
        #: (the semaphore to post, the one to wait for) in each round.
        self.rounds = [
            (first + k * num_ranks + (index + distance) % num_ranks, first + k * num_ranks + index)
            for k, distance in enumerate(distances)
        ]
        self._index = index
        self._distances = distances
        #: How often each rank has posted. A pair does not need it to know which rank is late, and :class:`ShmTransport
        #: <hvd_cluster.engine.transports.shm.ShmTransport>` executes its rounds itself.
        self._posts = [semaphores.counter(first + rank) for rank in range(num_ranks)] if num_ranks > 2 else []

    @staticmethod
    def num_semaphores(num_ranks: int) -> int:
        """How many semaphores a barrier of ``num_ranks`` needs."""
        return num_ranks * (num_ranks - 1).bit_length()

    def wait(self, deadline: Deadline) -> None:
        """Return when every rank has called this; each round has the full ``deadline``."""
        mine = self._posts[self._index] if self._posts else None
        for to_post, to_await in self.rounds:
            if mine is not None:
                mine.value += 1
            self._semaphores.post(to_post)
            self._semaphores.wait(to_await, deadline)

    def late(self) -> list[int]:
        """The ranks that delay this waiting one: not arrived, or stopped in the barrier.

        Ranks that are delayed themselves, in this barrier or the previous one, are not included.
        """
        if not self._posts:
            return [1 - self._index]
        posts = [counter.value for counter in self._posts]
        num_rounds, num_ranks = len(self._distances), len(posts)
        end = -(-posts[self._index] // num_rounds) * num_rounds  # of this barrier, counted in posts

        def waits(rank: int) -> bool:
            """Whether it lacks the post that it waits for in the round of its last one."""
            distance = self._distances[(posts[rank] - 1) % num_rounds]
            return posts[(rank - distance) % num_ranks] < posts[rank]

        others = (rank for rank in range(num_ranks) if rank != self._index)
        return [rank for rank in others if posts[rank] < end and not waits(rank)]
