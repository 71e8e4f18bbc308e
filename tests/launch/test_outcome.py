from __future__ import annotations

import re
import signal
import textwrap
import threading

import cloudpickle
import pytest
from torch.distributed import DistNetworkError

from hvd_cluster import errors
from hvd_cluster.errors import HorovodInternalError, LaunchError, WorkerFailedError
from hvd_cluster.launch.call import pack
from hvd_cluster.launch.hosts import parse_hosts
from hvd_cluster.launch.outcome import ErrorReport, Outcome, collect, first_failure, is_own_package, is_user_code
from hvd_cluster.launch.worker import perform
from hvd_cluster.topology import Topology


def done(rank: int, value: object = None) -> Outcome:
    return Outcome(rank, "h", value=cloudpickle.dumps(value), finished_at=1.0)


def raised(rank: int, error: BaseException, at: float = 1.0, **more: object) -> Outcome:
    return Outcome(rank, "h", error=report_of(error), finished_at=at, **more)  # type: ignore[arg-type]


def dead(rank: int, exit_code: int, at: float = 1.0, **more: object) -> Outcome:
    return Outcome(rank, "h", exit_code=exit_code, finished_at=at, **more)  # type: ignore[arg-type]


def report_of(error: BaseException) -> ErrorReport:
    try:
        raise error
    except type(error) as caught:
        return ErrorReport.of(caught)


class Unpicklable(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError("not me")


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_values_come_in_the_order_of_the_ranks() -> None:
    assert collect([done(2, "c"), done(0, None), done(1, [1])]) == [None, [1], "c"]


def test_the_failure_that_came_first_is_told_and_the_others_are_summed_up() -> None:
    outcomes = [
        raised(0, ValueError("late"), at=9.0),
        raised(1, KeyError("early"), at=3.0, output_tail="one\ntwo"),
        done(2),
        done(3),
        done(4),
        dead(5, -signal.SIGTERM, at=1.0, stopped=True),
        dead(6, -signal.SIGKILL, at=4.0),
        dead(7, -signal.SIGKILL, at=4.0),
    ]
    with pytest.raises(WorkerFailedError) as caught:
        collect(outcomes)
    text = str(caught.value)
    assert text.startswith("Traceback (most recent call last):")
    assert "KeyError: 'early'" in text
    assert "Rank 1 on host h raised KeyError." in text
    assert "rank 0 raised ValueError; ranks 2-4 finished; rank 5 was stopped by the launcher; ranks 6, 7 were" in text
    assert text.endswith("Last output of rank 1:\n  one\n  two")
    assert (caught.value.rank, caught.value.exit_code) == (1, None)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "echo",
    [
        HorovodInternalError("gone"),
        RuntimeError("[/x/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
        DistNetworkError("recvBytes: Connection reset by peer\nException raised from recvBytes"),
    ],
)
def test_an_error_that_another_ranks_death_caused_is_not_the_cause_even_if_it_came_first(
    echo: Exception,
) -> None:
    failed = first_failure([raised(0, echo, at=1.0), dead(1, -signal.SIGKILL, at=2.0)])
    assert failed is not None
    assert failed.rank == 1


class StoreError(RuntimeError):
    """As an object store's client raises it."""


@pytest.mark.parametrize(
    "own",
    [
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        StoreError("GET bucket/part-0: Connection reset by peer"),
        RuntimeError("Caught StoreError in DataLoader worker process 0.\nStoreError: Connection reset by peer"),
    ],
)
def test_a_lost_connection_of_the_user_is_the_cause(own: Exception) -> None:
    assert not raised(0, own).is_secondary
    with pytest.raises(WorkerFailedError) as caught:
        collect([raised(0, own, at=2.0), raised(1, HorovodInternalError("gone"), at=1.0)])
    assert (caught.value.rank, caught.value.died) == (0, False)


def test_a_host_whose_connection_was_reset_has_died_and_is_the_cause() -> None:
    why = "lost its host b: Connection reset by peer"
    lost = Outcome(0, "b", error=ErrorReport("LaunchError", why, f"LaunchError: {why}\n"), ending_text=why)
    assert not lost.is_secondary
    with pytest.raises(WorkerFailedError) as caught:
        collect([lost])
    assert caught.value.died


def test_an_error_raised_for_a_lost_connection_of_the_user_is_the_cause() -> None:
    def reads() -> None:
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except ConnectionResetError as error:
            raise RuntimeError(f"cannot read the data: {error}") from None

    with pytest.raises(RuntimeError) as caught:
        reads()
    assert not ErrorReport.of(caught.value).is_secondary


def test_a_secondary_failure_is_reported_when_nothing_else_failed() -> None:
    with pytest.raises(WorkerFailedError, match="Rank 1 on host h raised .*HorovodInternalError"):
        collect([done(0), raised(1, HorovodInternalError("mismatch"))])


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (3, "exited with code 3"),
        (0, "exited with code 0 before its function returned"),
        (-9, "killed by signal 9 (SIGKILL: killed, perhaps out of memory)"),
        (-11, "killed by signal 11 (SIGSEGV: it crashed in native code)"),
        (-40, "killed by signal 40 (a real-time signal)"),
    ],
)
def test_a_death_names_its_exit_code_or_signal(exit_code: int, words: str) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        collect([dead(0, exit_code)])
    assert words in str(caught.value)
    assert caught.value.exit_code == exit_code


def test_an_exception_that_cannot_be_pickled_still_gives_its_text() -> None:
    with pytest.raises(WorkerFailedError, match="Unpicklable: deep inside") as caught:
        collect([raised(0, Unpicklable("deep inside"))])
    assert caught.value.__cause__ is None
    assert "Unpicklable cannot be rebuilt here (it cannot be pickled)" in str(caught.value)


def test_an_exception_that_cannot_be_rebuilt_still_gives_its_text() -> None:
    with pytest.raises(WorkerFailedError, match="TwoArguments: 1 and 2") as caught:
        collect([raised(0, TwoArguments(1, 2))])
    assert caught.value.__cause__ is None
    assert re.search(r"TwoArguments cannot be rebuilt here \(.* missing 1 required", str(caught.value))


def test_an_exception_without_a_text_is_reported_too() -> None:
    assert report_of(Mute()).message == "<its __str__ raised RuntimeError>"


def test_a_result_that_cannot_be_rebuilt_here_names_the_rank() -> None:
    broken = Outcome(1, "h", value=b"cno_such_module\nThing\n.")
    with pytest.raises(LaunchError, match=r"rank 1 cannot be unpickled here \(ModuleNotFoundError"):
        collect([done(0), broken])


def test_of_an_error_raised_on_purpose_only_the_users_own_frames_are_shown() -> None:
    def asks_for_the_impossible() -> None:
        pack(int, (threading.Lock(),))  # a LaunchError from deep inside

    def stumbles() -> None:
        parse_hosts("wrong")  # a plain ValueError

    refused = perform(pack(asks_for_the_impossible), Topology()).error
    stumbled = perform(pack(stumbles), Topology()).error
    assert refused is not None
    assert stumbled is not None
    assert "in asks_for_the_impossible" in refused.traceback_text
    assert "in pack" not in refused.traceback_text.rpartition("The above exception")[2]
    assert "in parse_hosts" in stumbled.traceback_text


def test_the_traceback_begins_in_the_users_file_and_keeps_the_chain() -> None:
    def inner() -> None:
        try:
            cloudpickle.loads(b"garbage")
        except Exception as error:
            raise LookupError("outer") from error

    outcome = perform(pack(inner), Topology())
    assert outcome.error is not None
    text = outcome.error.traceback_text
    assert "hvd_cluster/launch" not in text
    assert "The above exception was the direct cause" in text
    assert text.count(__file__) == 2
    assert text.index("UnpicklingError") < text.index("LookupError: outer")


def test_the_class_of_an_error_distinguishes_news_of_another_failure_from_a_cause() -> None:
    def outcome(error: Exception) -> Outcome:
        return Outcome(0, "a", error=ErrorReport.of(error))

    class SaysTheSame(RuntimeError):
        """An error of the user's, whose text is ours."""

    assert outcome(errors.WorldEndedError("gone")).is_secondary
    assert outcome(errors.HorovodInternalError("gone")).is_secondary
    assert not outcome(errors.RanksDisagreeError("Mismatched data types")).is_secondary
    assert not outcome(SaysTheSame(errors.SHUT_DOWN_TEXT)).is_secondary


def test_what_serves_horovod_is_named_only_where_nothing_does() -> None:
    def text_of(message: str) -> str:
        with pytest.raises(WorkerFailedError) as failed:
            collect([raised(0, ModuleNotFoundError(message))])
        return str(failed.value)

    assert "whose driver has imported hvd_cluster.compat" in text_of("No module named 'horovod'")
    assert "hvd_cluster.compat" not in text_of("No module named 'horovodism'")


def test_files_are_distinguished() -> None:
    ours = is_user_code.__code__.co_filename
    assert is_own_package(ours)
    assert not is_user_code(ours)
    assert is_user_code(__file__)
    assert is_user_code("<ipython-input-3>")
    for library in (textwrap.__file__, cloudpickle.__file__, "<frozen runpy>"):
        assert not is_user_code(library)
        assert not is_own_package(library)
