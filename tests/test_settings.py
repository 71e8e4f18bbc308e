from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from hvd_cluster.settings import MIB, Settings


def test_defaults_are_horovods() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert (settings.fusion_threshold_bytes, settings.cycle_time_ms, settings.cache_capacity) == (128 * MIB, None, 1024)
    assert (settings.start_timeout_s, settings.spark_start_timeout_s, settings.stall_warning_s) == (30.0, 600.0, 60.0)


def test_an_argument_beats_the_environment_and_the_environment_the_default() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CACHE_CAPACITY": "7"}
    settings = Settings.from_env(environ, cycle_time_ms=2.5, cache_capacity=None)
    assert (settings.cycle_time_ms, settings.cache_capacity) == (2.5, 7)


def test_an_argument_beats_a_variable_that_cannot_be_read() -> None:
    assert Settings.from_env({"HOROVOD_CYCLE_TIME": "soon"}, cycle_time_ms=2.5).cycle_time_ms == 2.5


def test_all_wrong_variables_are_named_at_once() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "soon", "HOROVOD_FUSION_THRESHOLD": "-1", "HOROVOD_ELASTIC": "maybe"}
    with pytest.raises(ValueError, match="HOROVOD_") as raised:
        Settings.from_env(environ)
    text = str(raised.value)
    assert all(f"{name}={value!r}" in text for name, value in environ.items())
    assert "must be >= 0" in text
    assert "is neither 0 nor 1" in text


@pytest.mark.parametrize("wrong", [{"cycle_time_ms": -1.0}, {"gloo_timeout_s": 0}, {"log_level": "loud"}])
def test_a_wrong_argument_is_named(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        Settings.from_env({}, **wrong)


def test_not_a_number_is_not_a_time() -> None:
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME='nan'"):
        Settings.from_env({"HOROVOD_CYCLE_TIME": "nan"})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("on", True), ("0", False), ("no", False)])
def test_flags_read_as_people_write_them(text: str, value: bool) -> None:
    assert Settings.from_env({"HOROVOD_DYNAMIC_PROCESS_SETS": text}).dynamic_process_sets is value


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.from_env({knob.metadata["env"]: "" for knob in fields(Settings)}) == Settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().cycle_time_ms = 2.0  # type: ignore[misc]
