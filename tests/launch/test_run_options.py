from __future__ import annotations

import functools
import inspect
import io
import logging
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import hvd_cluster
from hvd_cluster.launch import local
from hvd_cluster.launch.host_options import HostOptions
from hvd_cluster.launch.run_options import RunOptions, checked_arguments, renamed
from hvd_cluster.launch.spec import ElasticSpec
from hvd_cluster.settings import Settings

WRONG: dict[str, tuple[Any, str]] = {
    "num_proc": (0, "num_proc=0 must be a whole number of at least 1"),
    "start_timeout": (0, "start_timeout=0 must be > 0 seconds"),
    "elastic_timeout": ("long", "elastic_timeout='long' must be > 0 seconds"),
    "env": ({"N": [1]}, r"the variable N=\[1\] for the workers must be a string, a number or a path"),
    "nics": (7, "nics=7 must be the name of a network interface, or several"),
    "network_interfaces": (7, "network_interfaces=7 must be the name of a network interface, or several"),
    "use_gloo": (True, "use_gloo and use_mpi exclude each other"),
}


def run_functions() -> list[Callable[..., Any]]:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    import hvd_cluster.ray
    import hvd_cluster.spark

    spark = [hvd_cluster.spark.run, hvd_cluster.spark.run_elastic]
    return [hvd_cluster.run, local.run, local.Executor, *spark, hvd_cluster.ray.run]


def test_every_launcher_refuses_a_wrong_value_of_a_shared_argument_before_it_starts_anything() -> None:
    for run in run_functions():
        names = WRONG.keys() & inspect.signature(run).parameters.keys()
        assert names >= {"num_proc", "start_timeout", "env"}, run
        for name in names:
            value, text = WRONG[name]
            more = {"use_mpi": True} if name == "use_gloo" else {}
            positional = () if run is local.Executor else (print,)
            with pytest.raises(ValueError, match=text):
                run(*positional, **{name: value}, **more)


#: Kind of an argument -> what is wrong for it.
WRONG_KINDS: dict[str, tuple[Any, ...]] = {
    "count": ("2", 1.5, True, -1),
    "amount": ("2", True, -1, math.nan),
    "flag": ("yes", 2),
    "verbosity": ("loud", 1.5, -1),
}
KINDS = {
    **dict.fromkeys(["num_proc", "min_num_proc", "max_num_proc", "reset_limit", "slots", "workers_per_task"], "count"),
    **dict.fromkeys(["num_workers", "num_hosts", "num_workers_per_host", "min_workers", "max_workers"], "count"),
    **dict.fromkeys(["start_timeout", "elastic_timeout", "placement_group_timeout", "timeout_s"], "amount"),
    **dict.fromkeys(["placement_group_timeout_s", "cpus_per_worker", "cpus_per_slot", "gpus_per_slot"], "amount"),
    **dict.fromkeys(["prefix_output_with_timestamp", "use_gloo", "use_mpi", "use_gpu", "override_discovery"], "flag"),
    **dict.fromkeys(["use_current_placement_group", "as_horovod"], "flag"),
    "gpus_per_worker": "amount",
    "verbose": "verbosity",
}
#: Argument -> the one that it needs.
NEEDED = {"max_num_proc": "min_num_proc", "reset_limit": "min_num_proc", "max_workers": "min_workers"}


def executors() -> list[Callable[..., Any]]:
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    from hvd_cluster.ray import ElasticRayExecutor, RayExecutor
    from hvd_cluster.ray.train import HorovodConfig

    elastic = functools.partial(ElasticRayExecutor, ElasticRayExecutor.create_settings())
    return [RayExecutor, RayExecutor.create_settings, elastic, ElasticRayExecutor.create_settings, HorovodConfig]


def test_every_launcher_refuses_a_count_a_time_or_a_flag_of_another_kind_by_its_name() -> None:
    refused = 0
    for make in [*run_functions(), *executors()]:
        parameters = inspect.signature(make).parameters
        positional = (print,) if "fn" in parameters or "func" in parameters else ()
        for name in KINDS.keys() & parameters.keys():
            more = {NEEDED[name]: 1} if NEEDED.get(name) in parameters else {}
            more |= {"use_gpu": True} if name.startswith("gpus_per") else {}
            for value in WRONG_KINDS[KINDS[name]]:
                with pytest.raises(ValueError, match=f"{name}={re.escape(repr(value))} must be") as raised:
                    make(*positional, **{name: value}, **more)
                assert type(raised.value) is ValueError
                refused += 1
    assert refused > 100


def test_a_launcher_takes_numbers_of_numpy() -> None:
    assert local.run(int, num_proc=np.int64(1), start_timeout=np.float32(60)) == [0]  # type: ignore[arg-type]


def test_every_launcher_suggests_the_argument_that_was_meant() -> None:
    for run in run_functions():
        positional = () if run is local.Executor else (print,)
        with pytest.raises(TypeError, match=r"no argument nun_proc \(did you mean num_proc\?\); it has .*env"):
            run(*positional, nun_proc=2)
        with pytest.raises(TypeError, match=r"num_workers \(did you mean num_proc\?\)"):
            run(*positional, num_workers=2)


def test_the_options_are_those_of_a_functions_arguments_that_are_given() -> None:
    def run(fn: object, num_proc: int | None = None, verbose: int | None = None, other: int = 3) -> HostOptions:
        return HostOptions.of(locals(), [] if other else ["other=0 must be more"])

    assert vars(run(print, 2)) == vars(HostOptions(num_proc=2))
    with pytest.raises(ValueError, match="^num_proc=-2 must be a whole number .*; other=0 must be more$"):
        run(print, -2, other=0)


def test_a_user_reads_the_names_that_the_user_has_given() -> None:
    names = {"num_proc": "-np", "max_num_proc": "--max-np", "cooldown_range": "--cooldown"}
    with pytest.raises(ValueError, match="^--max-np=1 is less than -np=2; --cooldown 9 3 must be two increasing"):
        RunOptions(num_proc=2, max_num_proc=1, cooldown_range=(9, 3), names=names)
    with pytest.raises(ValueError, match=r"cooldown_range=\(9,\) must be two numbers of seconds"):
        RunOptions(cooldown_range=(9,))


def test_an_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "7")
    assert RunOptions().settings().start_timeout_s == 7
    assert RunOptions(start_timeout=3).settings() == Settings(start_timeout_s=3, spark_start_timeout_s=3)


def test_the_workers_get_the_variables_of_the_interface_and_those_that_were_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = RunOptions(nics="eth1", env={"A": 1, "NCCL_SOCKET_IFNAME": "ib0"})
    assert options.variables == {"HOROVOD_GLOO_IFACE": "eth1", "NCCL_SOCKET_IFNAME": "ib0", "A": "1"}
    monkeypatch.setenv("HOROVOD_TORCH_BACKEND", "gloo")  # which a cluster's workers do not inherit
    assert RunOptions().variables == {"HOROVOD_TORCH_BACKEND": "gloo"}
    assert RunOptions(torch_backend="hvd").variables == {"HOROVOD_TORCH_BACKEND": "hvd"}
    assert options.task(b"call").env == options.variables
    assert options.interfaces == ("eth1",)


def test_lines_go_where_the_user_wants_them() -> None:
    shown = io.StringIO()
    RunOptions(stdout=shown, verbose=0).callbacks().on_line(3, "stdout", "here")
    assert shown.getvalue() == "[3]<stdout>:here\n"


def test_an_elastic_job_needs_no_more_workers_than_it_begins_with() -> None:
    task = RunOptions().task(b"call")
    options = RunOptions(num_proc=3, cooldown_range=[2, 5])
    spec = ElasticSpec.of(options, task, Settings(), is_discovered=True)
    assert (spec.num_proc, spec.min_num_proc, spec.max_num_proc, spec.cooldown_range_s) == (3, 3, None, (2, 5))
    assert RunOptions(min_num_proc=2).counts == (2, 2)
    assert RunOptions().counts == (1, 1)


def test_mpi_has_no_effect_and_the_user_reads_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        RunOptions.of({"use_mpi": True})
    assert caplog.messages == ["use_mpi=True has no effect: hvd_cluster does not use MPI"]


def test_each_option_has_one_default() -> None:
    defaults = {each.name: each.default for each in fields(RunOptions)}
    for run in run_functions():
        for name, parameter in inspect.signature(run).parameters.items():
            if name in defaults and parameter.default is not None and defaults[name] is not None:
                assert parameter.default == defaults[name], (run, name)


@checked_arguments
def function(a: int, b: int = 2, *more: int, c: Any = "c", d: Any = None, e: int = 0, **others: Any) -> tuple[Any, ...]:
    return a, b, more, c, d, e, others


def test_none_stands_for_a_default_wherever_it_is_given() -> None:
    assert function(1, None, 3, c=None, d=None, e=None, f=None) == (1, 2, (3,), "c", None, 0, {"f": None})  # type: ignore[arg-type]
    assert function(1, None) == (1, 2, (), "c", None, 0, {})  # type: ignore[arg-type]
    assert function(1, 0, c=0, d=4) == (1, 0, (), 0, 4, 0, {})
    assert list(inspect.signature(function).parameters) == ["a", "b", "more", "c", "d", "e", "others"]
    with pytest.raises(TypeError, match=r"function\(\) missing 1 required positional argument: 'a'"):
        function()  # type: ignore[call-arg]


def test_an_old_name_warns_where_it_is_used() -> None:
    @checked_arguments
    def run(np: int | None = None, num_proc: int | None = None) -> Any:
        return renamed("np", np, "num_proc", num_proc)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [run(num_proc=2), run(np=3)] == [2, 3]
    assert [(each.filename, str(each.message)) for each in caught] == [(__file__, "np is deprecated, use num_proc")]


def nones(run: Any, **needed: Any) -> dict[str, Any]:
    """None for each argument that may be left out, but those that are needed here."""
    parameters = list(inspect.signature(run).parameters.values())[1:]
    return {**{each.name: None for each in parameters}, **needed}


def test_run_takes_none_for_every_argument(capfd: pytest.CaptureFixture[str]) -> None:
    assert hvd_cluster.run(print, **nones(hvd_cluster.run)) == [None]
    assert capfd.readouterr().out == "[0]<stdout>:\n"


def test_run_takes_horovods_defaults() -> None:
    given = nones(hvd_cluster.run, args=(), num_proc=1, env={}, prefix_output_with_timestamp=False)
    assert hvd_cluster.run(int, **given) == [0]


def test_the_local_launcher_takes_none_for_every_argument() -> None:
    assert local.run(int, **nones(local.run, stdout=io.StringIO())) == [0]
