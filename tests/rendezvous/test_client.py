from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from hvd_cluster.errors import StaleWorldError
from hvd_cluster.rendezvous.client import KeyValueClient, KeyValueMailbox
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.rendezvous.server import KeyValueServer

SECRET = new_secret()


def test_messages_of_many_are_read_once_and_in_order() -> None:
    with KeyValueServer(SECRET) as server:
        reading, writing = (KeyValueClient(f"127.0.0.1:{server.port}", SECRET) for _ in range(2))
        box = KeyValueMailbox(reading, "box")
        for number in range(3):
            writing.push("box", b"%d" % number)
        assert [box.next(1) for _ in range(3)] == [b"0", b"1", b"2"]
        with pytest.raises(TimeoutError):
            box.next(0.05)
        late = threading.Timer(0.1, writing.push, ("box", b"late"))
        late.start()
        assert box.next(5) == b"late"
        late.join()
        assert reading.num_keys() == 1  # the counter: what was read does not stay
        reading.close()
        writing.close()


POST_FOR_EVER = """
import sys
from hvd_cluster.rendezvous.client import KeyValueClient
client = KeyValueClient(sys.argv[1], bytes.fromhex(sys.stdin.readline()))
while True:
    client.push("box", b"more")
"""


def test_a_writer_that_is_killed_while_it_posts_does_not_block_the_box() -> None:
    with KeyValueServer(SECRET) as server:
        address = f"127.0.0.1:{server.port}"
        reading, writing = KeyValueClient(address, SECRET), KeyValueClient(address, SECRET)
        command = [sys.executable, "-c", POST_FOR_EVER, address]
        writers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(6)]
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(SECRET.hex().encode() + b"\n")
            writer.stdin.close()
        deadline_s = time.monotonic() + 60
        while not writing.check([f"box/{300 * len(writers)}"]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for writer in writers:
            writer.kill()
            writer.wait()
        writing.push("box", b"last")
        box = KeyValueMailbox(reading, "box")
        count = 0
        while box.next(5) != b"last":
            count += 1
        assert count > 300 * len(writers)
        reading.close()
        writing.close()


def test_a_client_whose_wait_a_handler_has_ended_serves_every_kind_of_request() -> None:
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    with KeyValueServer(SECRET) as server:
        client = KeyValueClient(f"127.0.0.1:{server.port}", SECRET)
        previous = signal.signal(signal.SIGALRM, ring)
        try:
            for request, answer in (
                (lambda: client.add("number", 2), 2),
                (lambda: client.compare_set("text", b"", b"a"), b"a"),
                (lambda: client.check(["number"]), True),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(Alarm):
                    client.get("never", 30)
                assert request() == answer
        finally:
            signal.signal(signal.SIGALRM, previous)
        client.close()


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
        assert "has continued without this process" in str(told[0])
        for ask in (lambda: client.set("world/3.0/member/1", b""), lambda: client.check(["world/3.1/members"])):
            with pytest.raises(StaleWorldError):
                ask()
        client.set("other", b"world/3.0/")
        assert client.get("world/31.0/member/0", 1)
        assert client.num_keys() == 2
        client.close()
        waiting.close()
