from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.launch.logs import (
    MAX_LINE_BYTES,
    LinePrinter,
    LineSplitter,
    RankFiles,
    Tail,
    Tracebacks,
    prefixed,
    printer,
)


@pytest.mark.long
@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))), st.integers(1, 7))
def test_lines_come_out_whole_however_the_bytes_arrive(lines: list[str], step: int) -> None:
    data = "\n".join(lines).encode()
    splitter = LineSplitter()
    out: list[str] = []
    for start in range(0, len(data), step):
        out += splitter.feed(data[start : start + step])
    out += splitter.flush()
    expected = lines[:-1] if lines and not lines[-1] else lines
    assert out == expected


def test_undecodable_bytes_are_replaced() -> None:
    assert LineSplitter().feed(b"a\xff\xfeb\n") == ["a��b"]


def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b" 10%\r 50%\r100%\r\nnext") == ["100%"]
    for step in range(20_000):
        assert splitter.feed(b"\rstep %d" % step) == []
    assert splitter.flush() == ["step 19999"]


def test_a_line_without_end_is_cut() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 5)) + splitter.flush()
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5]


def test_the_prefix_is_horovods() -> None:
    assert prefixed(3, "stderr", "hi") == "[3]<stderr>:hi"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[0\]<stdout>:hi", prefixed(0, "stdout", "hi", at=1e9))


def test_the_printer_keeps_the_streams_apart_and_stops_at_its_cap() -> None:
    out, err = io.StringIO(), io.StringIO()
    printer = LinePrinter(out, err, max_lines=2)
    for number in range(4):
        printer(0, "stdout", f"a{number}")
    printer(1, "stderr", "b")
    assert out.getvalue().splitlines()[:2] == ["[0]<stdout>:a0", "[0]<stdout>:a1"]
    assert out.getvalue().splitlines()[2:] == [
        "[0]<stdout>:... (more than 2 lines; verbose=2 shows the rest of rank 0)"
    ]
    assert err.getvalue() == "[1]<stderr>:b\n"


def test_the_printer_follows_a_replaced_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    LinePrinter()(0, "stdout", "here")
    assert capsys.readouterr().out == "[0]<stdout>:here\n"


def test_a_stream_that_has_no_such_character_or_is_closed_costs_nothing_but_the_line() -> None:
    raw = io.BytesIO()
    latin = io.TextIOWrapper(raw, encoding="ascii")
    printer = LinePrinter(latin)
    printer(0, "stdout", "pi is \u03c0")
    assert raw.getvalue() == b"[0]<stdout>:pi is \\u03c0\n"
    latin.close()
    printer(0, "stdout", "nobody reads this")


def test_a_stream_whose_reader_is_gone_does_not_take_the_other_one_with_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = io.StringIO()
    with open(writer, "w") as out:  # noqa: PTH123 - a descriptor
        printer = LinePrinter(out, errors)
        for number in range(2):
            printer(0, "stdout", f"line {number}")
            printer(0, "stderr", f"warning {number}")
        with contextlib.suppress(BrokenPipeError):
            out.close()
    assert errors.getvalue() == "[0]<stderr>:warning 0\n[0]<stderr>:warning 1\n"


def test_the_tail_holds_the_last_lines() -> None:
    tail = Tail(2)
    for line in ("a", "b", "c" * 5000):
        tail.add(line)
    assert tail.text() == "b\n" + "c" * 1000


def test_files_are_numbered_with_leading_zeros(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "new" / "logs", 11)
    files(3, "stderr", "kept")
    files.close()
    assert (tmp_path / "new/logs/rank.03/stderr").read_text() == "kept\n"
    assert (tmp_path / "new/logs/rank.10/stdout").read_text() == ""


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    files = RankFiles(tmp_path, 1)
    for stream in ("stdout", "stderr", "stdout"):
        files(0, stream, "line")
    files.close()
    assert (tmp_path / "rank.0" / "stderr").read_text() == "line\n"
    assert [record.getMessage() for record in caplog.records] == [
        f"lines of the workers' output are missing under {tmp_path}: [Errno 28] No space left on device"
    ]


def test_verbose_0_drops_lines_unless_a_stream_says_where_they_go(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    printer(None, None, with_timestamp=False, verbose=0)(0, "stdout", "dropped")
    printer(stream, None, with_timestamp=False, verbose=0)(0, "stdout", "kept")
    printer(None, None, with_timestamp=False, verbose=1)(1, "stderr", "shown")
    assert (stream.getvalue(), *capfd.readouterr()) == ("[0]<stdout>:kept\n", "", "[1]<stderr>:shown\n")


@pytest.mark.long
def test_a_pipe_that_does_not_wait_loses_nothing() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(reader, True)
    lines = [f"{number} " + "\N{SNOWMAN}" * 20_000 for number in range(20)]
    with os.fdopen(reader, encoding="utf-8") as source:
        text: list[str] = []
        thread = threading.Thread(target=lambda: text.append(source.read()))
        with os.fdopen(writer, "w", encoding="utf-8") as target:
            for _ in range(100_000):  # the driver's own prints fill it
                with contextlib.suppress(BlockingIOError):
                    print("own", file=target, flush=True)
            thread.start()
            show = LinePrinter(target, target)
            for line in lines:
                show(0, "stdout", line)
        thread.join()
    shown = [line for line in text[0].splitlines() if line != "own"]
    assert shown == [f"[0]<stdout>:{line}" for line in lines]


HEADLINE = "Traceback (most recent call last):"


def test_a_traceback_is_passed_on_when_its_rank_lives_on() -> None:
    lines: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
    held = Tracebacks(lambda *line: lines.put(line), hold_s=0.05)
    held(0, "stderr", HEADLINE)
    held(0, "stdout", "a result")
    held(0, "stderr", "ValueError: x")
    assert [lines.get(timeout=30) for _ in range(3)] == [
        (0, "stdout", "a result"),
        (0, "stderr", HEADLINE),
        (0, "stderr", "ValueError: x"),
    ]
    assert held.take([0]) == []


def test_equal_tracebacks_are_taken_as_one_and_the_rest_is_passed_on() -> None:
    lines: list[tuple[int, str, str]] = []
    held = Tracebacks(lambda *line: lines.append(line))
    for rank in (3, 0, 1, 2):
        held(rank, "stderr", HEADLINE)
        held(rank, "stderr", "KeyError: 1" if rank == 1 else "ValueError: x")
    assert held.take([3, 0, 1]) == [([0, 3], f"{HEADLINE}\nValueError: x"), ([1], f"{HEADLINE}\nKeyError: 1")]
    held.close()
    assert lines == [(2, "stderr", HEADLINE), (2, "stderr", "ValueError: x")]


def test_the_traceback_of_an_exception_group_is_held_too() -> None:
    lines: list[tuple[int, str, str]] = []
    held = Tracebacks(lambda *line: lines.append(line))
    headline = f"  + Exception Group {HEADLINE}"
    held(0, "stderr", headline)
    assert held.take([0]) == [([0], headline)]
    assert lines == []


def test_what_a_rank_writes_before_its_last_traceback_is_passed_on() -> None:
    lines: list[tuple[int, str, str]] = []
    held = Tracebacks(lambda *line: lines.append(line))
    survived = [HEADLINE, "WorldEndedError: gone", "checkpoint written"]
    for line in (*survived, HEADLINE, "WorldEndedError: gone"):
        held(0, "stderr", line)
    assert lines == [(0, "stderr", line) for line in survived]
    assert held.take([0]) == [([0], f"{HEADLINE}\nWorldEndedError: gone")]


@pytest.mark.parametrize(
    "link", ["During handling of the above exception, another exception occurred:", 'RemoteTraceback:\n"""']
)
def test_a_chain_of_tracebacks_is_held_as_one(link: str) -> None:
    held = Tracebacks(lambda *line: pytest.fail("passed on"))
    text = f"{HEADLINE}\nKeyError: 1\n\n{link}\n\n{HEADLINE}\nValueError: x"
    for line in text.split("\n"):
        held(0, "stderr", line)
    assert held.take([0]) == [([0], text)]


def test_a_syntax_error_at_the_end_of_a_traceback_is_held_with_it() -> None:
    held = Tracebacks(lambda *line: pytest.fail("passed on"))
    text = f'{HEADLINE}\n  File "a.py", line 1, in f\n  File "<string>", line 1\n    1 +\nSyntaxError: invalid syntax'
    for line in text.split("\n"):
        held(0, "stderr", line)
    assert held.take([0]) == [([0], text)]


def test_lines_that_follow_a_released_traceback_come_after_it() -> None:
    lines: list[str] = []
    is_writing, may_write = threading.Event(), threading.Event()

    def slow(_rank: int, _stream: str, line: str) -> None:
        if line == HEADLINE:
            is_writing.set()
            may_write.wait(30)
        lines.append(line)

    held = Tracebacks(slow, hold_s=0.0)
    held(0, "stderr", HEADLINE)
    assert is_writing.wait(30)
    later = threading.Thread(target=held, args=(0, "stderr", "later"))
    later.start()
    later.join(0.5)  # it must wait for the headline
    may_write.set()
    later.join()
    held.close()
    assert lines == [HEADLINE, "later"]
