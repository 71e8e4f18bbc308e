from __future__ import annotations

import inspect
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster import ray
from hvd_cluster.errors import LaunchError
from hvd_cluster.estimators import RayBackend, SparkBackend
from hvd_cluster.launch.checks import checked_variables
from hvd_cluster.ray import ElasticRayExecutor, RayExecutor, nodes
from hvd_cluster.ray.adapter import packed
from hvd_cluster.ray.discovery import RayHostDiscovery, TestDiscovery
from hvd_cluster.ray.settings import MiniSettings, nics_to_env_var


def test_settings_have_horovods_defaults() -> None:
    settings = RayExecutor.create_settings()
    assert (settings.timeout_s, settings.start_timeout, settings.placement_group_timeout_s) == (30, 30, 100)
    assert (settings.nics, settings.verbose, settings.elastic) == (None, 1, False)
    assert (MiniSettings().timeout_s, MiniSettings().placement_group_timeout_s) == (300, 100)
    elastic = ElasticRayExecutor.create_settings(min_np=2, max_np=4, verbose=0, cooldown_range=(1, 2))
    assert (elastic.min_num_proc, elastic.max_num_proc, elastic.elastic_timeout) == (2, 4, 600)
    assert (elastic.verbose, elastic.cooldown_range, elastic.elastic) == (0, (1, 2), True)


def test_the_text_of_an_ssh_key_is_written_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    settings = RayExecutor.create_settings(ssh_identity_file=str(file), ssh_str="secret")
    assert settings.ssh_identity_file == str(file)
    assert file.read_text() == "secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("make", "unknown", "near"),
    [
        (RayExecutor, {"cpus_per_slot": 2}, "cpus_per_worker"),
        (RayExecutor, {"num_slots": 2}, "num_workers"),
        (RayExecutor, {"min_np": 2}, "min_workers"),
        (RayExecutor, {"use_gpus": True}, "use_gpu"),
        (RayExecutor, {"resources_per_worker": {"CPU": 2}}, "cpus_per_worker"),
        (RayExecutor.create_settings, {"timeout": 3}, "timeout_s"),
        (ElasticRayExecutor.create_settings, {"elastic_timeout_s": 3}, "elastic_timeout"),
        (partial(ElasticRayExecutor, None), {"cpus_per_worker": 3}, "cpus_per_slot"),
        (partial(TestDiscovery, 1, 2, 3.0), {"frequency_s": 3}, "change_frequency_s"),
        (RayExecutor(num_workers=1).start, {"executable_class": int}, "executable_cls"),
        (partial(RayExecutor(num_workers=1).run, int), {"callback": []}, "callbacks"),
        (partial(ray.run, int), {"num_workers": 2}, "num_proc"),
        (partial(ray.run, int), {"use_gpus": True}, "use_gpu"),
    ],
)
def test_an_argument_that_does_not_exist_is_refused_with_the_one_that_was_meant(
    make: Any, unknown: dict[str, Any], near: str
) -> None:
    with pytest.raises(TypeError, match=rf"{next(iter(unknown))} \(did you mean {near}\?\)"):
        make(**unknown)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"max_workers": 2}, ["min_workers is not"]),
        ({"min_workers": 0}, ["min_workers=0 must be a whole number of at least 1"]),
        ({"min_workers": 1, "override_discovery": False}, ["override_discovery=False needs settings with a"]),
        (
            {"min_workers": 1, "num_workers": 1},
            ["Both `min_workers` and `num_workers` provided.", "min_workers makes the job elastic"],
        ),
        ({"num_workers": 1, "gpus_per_worker": 1}, ["use_gpu is not"]),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0.5}, ["cannot share a GPU"]),
        ({"num_workers": 2, "num_hosts": 2}, ["exclude each other"]),
        ({"num_workers": 2, "num_workers_per_host": 2}, ["num_workers_per_host=2 needs num_hosts too"]),
        ({"min_workers": 2, "num_workers_per_host": 2}, ["num_workers_per_host=2 needs num_hosts too"]),
        (
            {"num_workers": 2, "reset_limit": 3, "elastic_timeout": 5, "override_discovery": False},
            [f"{name} needs min_workers too" for name in ("reset_limit=3", "elastic_timeout=5")],
        ),
        ({"num_workers": "4", "use_gpu": "yes"}, ["num_workers='4' must be a whole number", "True or False"]),
        ({"num_workers": 2.5, "cpus_per_worker": "1"}, ["num_workers=2.5", "cpus_per_worker='1' must be a number"]),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 1.5}, ["a whole number >= 1"]),
        (
            {"min_workers": 1, "cooldown_range": 5, "elastic_timeout": "9"},
            ["cooldown_range=5", "elastic_timeout='9'"],
        ),
        ({"min_workers": 3, "max_workers": 2, "gpus_per_worker": 2}, ["less than min_workers", "use_gpu is not"]),
    ],
)
def test_contradictions_are_named_all_at_once(arguments: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ValueError, match=".") as raised:
        RayExecutor(RayExecutor.create_settings(), **arguments)
    assert all(text in str(raised.value) for text in texts)


def test_settings_of_the_wrong_type_are_named() -> None:
    with pytest.raises(ValueError, match=r"settings=\{'timeout_s': 3\} must be what create_settings\(\) returns"):
        RayExecutor({"timeout_s": 3}, num_workers=1)
    with pytest.raises(ValueError, match="override_discovery=False needs settings with a discovery"):
        ElasticRayExecutor(ElasticRayExecutor.create_settings(), override_discovery=False)
    with pytest.raises(ValueError, match="timeout_s='30' must be a number of seconds; .*nics=7 must be the name"):
        RayExecutor.create_settings(timeout_s="30", nics=7)  # type: ignore[arg-type]


def test_nics_become_the_variable_of_the_interface(caplog: pytest.LogCaptureFixture) -> None:
    assert nics_to_env_var(None) == {}
    assert nics_to_env_var("eth1") == {"HOROVOD_GLOO_IFACE": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert nics_to_env_var({"eth0", "eth1"}) == {"HOROVOD_GLOO_IFACE": "eth0", "NCCL_SOCKET_IFNAME": "eth0,eth1"}
    assert "Gloo uses only eth0" in caplog.text


def test_the_number_of_workers_may_not_be_left_open(tmp_path: Path) -> None:
    assert RayExecutor(num_workers=2).num_workers == 2
    with pytest.raises(LaunchError, match=r"call start\(\) first"):
        RayExecutor(num_workers=2).run(print)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"), [(3, None, r"\[3\], not 3"), ("ab", None, "'ab'"), ([], [1], "dict")]
)
def test_arguments_of_the_wrong_type_are_named(args: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        packed(print, args, kwargs)
    with pytest.raises(TypeError, match=r"variables for the workers must be a dict, .* not \['A'\]"):
        checked_variables(["A"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must have strings as names, such as 'NCCL_DEBUG', not 2$"):
        checked_variables({"A": 1, 2: "B"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"min_num_proc": 0, "timeout_s": -1},
            "timeout_s=-1 must be >= 0; min_num_proc=0 must be a whole number of at least 1",
        ),
        ({"min_num_proc": "2"}, "min_num_proc='2' must be a whole number of at least 1"),
        ({"min_np": 3, "max_np": 2}, "max_num_proc=2 is less than min_num_proc=3"),
    ],
)
def test_wrong_numbers_of_an_elastic_job_are_told_by_the_names_of_the_settings(wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        ElasticRayExecutor.create_settings(**wrong)


def test_none_is_not_given_in_every_argument_of_an_executor() -> None:
    settings = RayExecutor.create_settings()
    assert RayExecutor(settings, num_workers=4, num_hosts=None, num_workers_per_host=None).num_workers == 4
    names = set(inspect.signature(RayExecutor).parameters) - {"settings", "num_workers", "unknown"}
    RayExecutor(settings, num_workers=4, **dict.fromkeys(names))
    assert RayExecutor.create_settings(timeout_s=None, verbose=None) == settings  # type: ignore[arg-type]
    discovery = RayHostDiscovery(cpus_per_slot=None, gpus_per_slot=None)  # type: ignore[arg-type]
    assert (discovery.cpus_per_slot, discovery.gpus_per_slot) == (1, 1)


def test_a_node_is_alive_by_either_spelling_and_not_without_one() -> None:
    assert nodes.is_alive({"Alive": True})
    assert nodes.is_alive({"alive": True})
    assert not nodes.is_alive({"Alive": False})
    assert not nodes.is_alive({"NodeID": "a"})


#: The defaults of Horovod's functions, as they are documented; the settings have none.
ARGUMENTS = {
    "num_workers": None,
    "num_hosts": None,
    "num_workers_per_host": 1,
    "cpus_per_worker": 1,
    "use_gpu": False,
    "gpus_per_worker": None,
    "use_current_placement_group": True,
    "min_workers": None,
    "max_workers": None,
    "reset_limit": None,
    "cooldown_range": None,
    "elastic_timeout": 600,
    "override_discovery": True,
}
SETTINGS = {
    "timeout_s": 30,
    "ssh_identity_file": None,
    "ssh_str": None,
    "placement_group_timeout_s": 100,
    "nics": None,
}
ELASTIC = {"use_gpu": False, "cpus_per_slot": 1, "gpus_per_slot": None, "env_vars": None, "override_discovery": True}
ELASTIC_SETTINGS = {
    "min_num_proc": 1,
    "max_num_proc": None,
    "reset_limit": None,
    "elastic_timeout": 600,
    "timeout_s": 30,
    "ssh_identity_file": None,
    "nics": None,
    "min_np": None,
    "max_np": None,
}


def shown(value: Any) -> Any:
    """What a constructor has made of its arguments."""
    return repr(getattr(value, "_spec", None) or getattr(value, "settings", value))


@pytest.mark.parametrize(
    ("make", "needed", "defaults"),
    [
        (RayExecutor, (RayExecutor.create_settings(),), ARGUMENTS),
        (RayExecutor.create_settings, (), SETTINGS),
        (ElasticRayExecutor, (ElasticRayExecutor.create_settings(),), ELASTIC),
        (ElasticRayExecutor.create_settings, (), ELASTIC_SETTINGS),
    ],
)
def test_horovods_defaults_and_none_say_nothing(make: Any, needed: tuple[Any, ...], defaults: dict[str, Any]) -> None:
    left_out = shown(make(*needed))
    assert shown(make(*needed, **defaults)) == left_out
    assert shown(make(*needed, **dict.fromkeys(defaults))) == left_out
    assert shown(make(*needed, *defaults.values())) == left_out
    assert shown(make(*needed, *[None] * len(defaults))) == left_out


def test_settings_and_backends_of_none_say_nothing() -> None:
    assert ElasticRayExecutor.create_settings(verbose=None, placement_group_timeout_s=None).verbose == 1
    assert MiniSettings(timeout_s=None, verbose=None, elastic=None) == MiniSettings()  # type: ignore[arg-type]
    of_a_worker = dict.fromkeys(["cpus_per_worker", "use_gpu", "gpus_per_worker", "use_current_placement_group"])
    assert RayBackend(2, **of_a_worker)._of_a_worker() == RayBackend(2)._of_a_worker()
    assert SparkBackend(2, workers_per_task=None)._per_task == 1
