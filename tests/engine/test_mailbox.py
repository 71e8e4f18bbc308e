"""What is handed to the engine, without ranks: nothing that was handed in is left without an answer."""

from collections.abc import Iterator
from select import poll

import pytest

from hvd_cluster.engine.mailbox import Mailbox
from hvd_cluster.engine.request import Handle
from hvd_cluster.engine.timer import Timer
from hvd_cluster.errors import HorovodInternalError


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox(0.001)
    yield mailbox
    mailbox.close()


def test_a_join_that_nobody_has_taken_fails_when_the_world_ends(mailbox: Mailbox) -> None:
    handle = Handle()
    mailbox.join(handle, -1)
    mailbox.command("leave")
    mailbox.end("the world has ended")
    assert handle.done
    with pytest.raises(HorovodInternalError, match="the world has ended"):
        handle.wait()
    assert mailbox.take_commands() == [("leave", None)]


def test_a_join_after_the_end_fails_at_once(mailbox: Mailbox) -> None:
    mailbox.end("the world has ended")
    handle = Handle()
    mailbox.join(handle, -1)
    with pytest.raises(HorovodInternalError, match="the world has ended"):
        handle.wait()


def test_a_timer_goes_off_once_for_each_start() -> None:
    timer = Timer(0.001)
    waiting = poll()
    waiting.register(timer.descriptor)
    for _ in range(3):
        assert not waiting.poll(5)
        timer.start()
        assert waiting.poll(1000)
        timer.silence()
    timer.start()
    timer.silence()  # before its time: a later start has to set it off all the same
    timer.start()
    assert waiting.poll(1000)
    timer.close()
