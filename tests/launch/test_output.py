from __future__ import annotations

import os
import queue

from hvd_cluster.launch.output import OutputReader


def test_lines_of_several_pipes_are_passed_on_by_the_name_of_their_stream() -> None:
    heard: list[tuple[str, str]] = []
    (out_reader, out), (err_reader, err) = os.pipe(), os.pipe()
    reader = OutputReader(
        {"stdout": out_reader, "stderr": err_reader},
        lambda stream, lines: heard.extend((stream, line) for line in lines),
        "hvd-output",
    )
    os.write(out, b"one\ntw")
    os.write(err, b"three\n")
    reader.catch_up()()
    assert sorted(heard) == [("stderr", "three"), ("stdout", "one")]
    os.write(out, b"o\nlast")
    reader.end()  # although the writing ends are open still
    reader.join()
    assert heard[2:] == [("stdout", "two"), ("stdout", "last")]
    os.close(out)
    os.close(err)


def test_catching_up_does_not_wait_before_it_is_asked_to() -> None:
    passed: list[str] = []
    end, writer = os.pipe()
    reader = OutputReader({"stdout": end}, lambda _, lines: passed.extend(lines), "hvd-output")
    first, second = reader.catch_up(), reader.catch_up()
    os.write(writer, b"later\n")
    third = reader.catch_up()
    for wait in (first, second, third):
        wait()
    assert passed == ["later"]
    os.close(writer)
    reader.end()
    reader.join()


def test_a_progress_bar_is_seen_before_it_is_complete() -> None:
    passed: queue.SimpleQueue[str] = queue.SimpleQueue()
    end, writer = os.pipe()

    def pass_on(_stream: str, lines: list[str]) -> None:
        for line in lines:
            passed.put(line)

    reader = OutputReader({"stderr": end}, pass_on, "hvd-output", version_s=0.05)
    try:
        for version in ("10%", "20%"):
            os.write(writer, b"\r" + version.encode())
            assert passed.get(timeout=20) == version
        os.write(writer, b"\r100%\n")
        assert passed.get(timeout=20) == "100%"
    finally:
        os.close(writer)
        reader.end()
        reader.join()
    assert passed.empty()
