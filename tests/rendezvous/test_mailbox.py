from __future__ import annotations

import threading
import time

import pytest

from hvd_cluster.errors import StaleWorldError
from hvd_cluster.rendezvous.client import KeyValueClient
from hvd_cluster.rendezvous.mailbox import MailboxReader, post
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer

SECRET = new_secret()


def test_messages_of_many_are_read_once_and_in_order() -> None:
    with KeyValueServer(SECRET) as server:
        reading, writing = (KeyValueClient(f"127.0.0.1:{server.port}", SECRET) for _ in range(2))
        box = MailboxReader(reading, "box")
        for number in range(3):
            post(writing, "box", b"%d" % number)
        assert [box.next(1) for _ in range(3)] == [b"0", b"1", b"2"]
        with pytest.raises(TimeoutError):
            box.next(0.05)
        threading.Timer(0.1, post, (writing, "box", b"late")).start()
        assert box.next(5) == b"late"
        assert reading.num_keys() == 1  # the counter: what was read does not stay
        reading.close()
        writing.close()


def test_the_keys_of_a_world_that_is_over_are_gone_and_refused() -> None:
    with KeyValueServer(SECRET) as server:
        client, waiting = (KeyValueClient(f"127.0.0.1:{server.port}", SECRET) for _ in range(2))
        client.set("world/3.0/member/0", b"x")
        client.set("world/31.0/member/0", b"world/3.0/ as a value is none of its keys")
        told: list[BaseException] = []

        def wait() -> None:
            try:
                waiting.get("world/3.0/members", 30)
            except StaleWorldError as error:
                told.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        server.close_keys("world/3.")
        thread.join(5)
        assert "has gone on without this process" in str(told[0])
        for ask in (lambda: client.set("world/3.0/member/1", b""), lambda: client.check(["world/3.1/members"])):
            with pytest.raises(StaleWorldError):
                ask()
        client.set("other", b"world/3.0/")
        assert client.get("world/31.0/member/0", 1)
        assert client.num_keys() == 2
        client.close()
        waiting.close()
