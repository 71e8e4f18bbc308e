"""Flow control of the workers' output: nobody waits for ever, and little is on its way."""

from __future__ import annotations

import queue
import threading

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_cluster.launch.wire.agent_messages import WINDOW_BYTES, ReceiveWindow, SendWindow


@settings(deadline=None)
@given(st.lists(st.integers(1, 2 * WINDOW_BYTES), max_size=40))
@example([3000, 60_000])  # what was taken first is not told yet
@example([WINDOW_BYTES // 4 - 1, WINDOW_BYTES])
def test_all_that_is_sent_is_taken_whatever_the_sizes(sizes: list[int]) -> None:
    window, taken = SendWindow(), ReceiveWindow()
    way: queue.SimpleQueue[int] = queue.SimpleQueue()

    def send() -> None:
        for size in sizes:
            window.acquire(size)
            way.put(size)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for size in sizes:
            assert way.get(timeout=30) == size
            if num_bytes := taken.add(size):
                window.release(num_bytes)
    finally:
        window.close()
        sender.join()


def test_no_more_than_a_window_is_sent_unheard() -> None:
    window, sent = SendWindow(), threading.Event()

    def send() -> None:
        for _ in range(WINDOW_BYTES // 1000):
            window.acquire(1000)
        sent.set()
        window.acquire(1000)

    sender = threading.Thread(target=send)
    sender.start()
    assert sent.wait(30)
    sender.join(0.2)
    assert sender.is_alive()
    window.release(1000)
    sender.join(30)
    assert not sender.is_alive()
