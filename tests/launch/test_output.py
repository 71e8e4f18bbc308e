from __future__ import annotations

import os

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
