from __future__ import annotations

import inspect
import pickle

import pytest

from hvd_cluster import errors
from hvd_cluster.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    LaunchError,
    MissingExtraError,
    NotEnoughSlotsError,
    NotInitializedError,
    StartTimeoutError,
    WorkerFailedError,
)

ONE_OF_EACH = [
    HorovodInternalError("gone"),
    errors.RanksDisagreeError("Mismatched data types"),
    errors.JoinUnsupportedError("Allgather is not supported with Join at this time."),
    errors.WorldEndedError("Horovod has been shut down."),
    errors.GradientChangedError("the gradient of weight was changed"),
    HostsUpdatedInterrupt(skip_sync=True),
    HorovodVersionMismatchError("torch", "2.0", "2.13"),
    NotInitializedError(),
    errors.UnsupportedReductionError("reducescatter supports op=hvd.Average and op=hvd.Sum"),
    errors.DuplicateNameError("the same name as another tensor"),
    errors.DataError("column 'x' is not there"),
    errors.RunInUseError("run 'r' is fitted by process 7 of host a"),
    LaunchError("no"),
    NotEnoughSlotsError("8 slots needed, 6 free"),
    StartTimeoutError("rank 3 did not report"),
    WorkerFailedError("Traceback ...", rank=3, exit_code=-9),
    MissingExtraError("pyarrow", "data", "to read Parquet"),
    errors.AuthenticationError("no proof"),
    errors.StaleWorldError("generation 2 is over"),
]


def test_the_list_above_is_complete() -> None:
    raised = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)}
    assert {type(error) for error in ONE_OF_EACH} == raised


@pytest.mark.parametrize("error", ONE_OF_EACH, ids=lambda error: type(error).__name__)
def test_an_error_arrives_whole_from_another_process(error: Exception) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_programs_that_catch_the_builtin_kind_catch_ours() -> None:
    for ours, builtin in [
        (HorovodInternalError, RuntimeError),
        (errors.RanksDisagreeError, HorovodInternalError),
        (errors.JoinUnsupportedError, HorovodInternalError),
        (errors.WorldEndedError, HorovodInternalError),
        (HostsUpdatedInterrupt, RuntimeError),
        (HorovodVersionMismatchError, ImportError),
        (NotInitializedError, ValueError),
        (errors.UnsupportedReductionError, ValueError),
        (errors.UnsupportedReductionError, RuntimeError),
        (errors.DuplicateNameError, ValueError),
        (StartTimeoutError, TimeoutError),
        (WorkerFailedError, RuntimeError),
    ]:
        assert issubclass(ours, builtin)


def test_every_failed_launch_is_one_kind() -> None:
    assert issubclass(NotEnoughSlotsError, LaunchError)
    assert issubclass(StartTimeoutError, LaunchError)
    assert issubclass(WorkerFailedError, LaunchError)


def test_not_initialized_says_what_horovod_said() -> None:
    assert str(NotInitializedError()) == "Horovod has not been initialized; use hvd.init()."


def test_a_missing_extra_says_how_to_install_it() -> None:
    assert "pip install '.[data]'" in str(MissingExtraError("pyarrow", "data", "to read Parquet"))
