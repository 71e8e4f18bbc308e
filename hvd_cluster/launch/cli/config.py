"""``--config-file``: a YAML file with values for flags that are not given.

Flags on the command line have priority.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd_cluster.launch.cli.knobs import KNOBS, OBSOLETE, SWITCHES

#: The parsed values that a config file can set.
DESTS = (*(knob.dest for knob in KNOBS), *(switch.dest for switch in SWITCHES))


def _with_prefix(prefix: str) -> dict[str, str]:
    return {dest.removeprefix(prefix): dest for dest in DESTS if dest.startswith(prefix)}


#: Section -> key -> name of the parsed value.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "params": {
        key: key for key in ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity", "hierarchical_allreduce")
    },
    "autotune": {"enabled": "autotune", **_with_prefix("autotune_")},
    "timeline": _with_prefix("timeline_"),
    "stall_check": {"enabled": "stall_check", **_with_prefix("stall_check_")},
    "library_options": {"gloo_timeout_seconds": "gloo_timeout_seconds"},
    "logging": _with_prefix("log_"),
}
#: Section -> key -> the flag with the same meaning, which has no effect.
_OBSOLETE_KEYS: Mapping[str, Mapping[str, str]] = {
    "params": {"hierarchical_allgather": "--hierarchical-allgather", "torus_allreduce": "--torus-allreduce"},
    "library_options": {
        "mpi_threads_disable": "--mpi-threads-disable",
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
    },
}


def apply_config(parsed: argparse.Namespace, path: str) -> None:
    """Set the attributes of ``parsed`` that are None from the file.

    Raises:
        ValueError: the file cannot be read, or sets something that no flag can set; the message names all such entries.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config-file={path} cannot be read: {error}") from error
    if content is None:
        return
    apply_entries(parsed, content, f"--config-file={path}")


def apply_entries(parsed: argparse.Namespace, content: Any, source: str) -> None:
    """Set the attributes of ``parsed`` that are None from a config file.

    Raises:
        ValueError: an entry sets something that no flag can set; the message names all such entries.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{source} must have sections such as 'params:', got {type(content).__name__}")
    wrong: list[str] = []
    for section, entries in content.items():
        if section == "controller":
            if entries == "mpi":
                _note(parsed, "controller: mpi", "--mpi")
            elif entries != "gloo":
                wrong.append(f"controller: {entries!r} is neither gloo nor mpi")
        elif section not in _KEYS:
            wrong.append(f"{section}: is not one of the sections controller, {', '.join(_KEYS)}")
        elif entries is not None and not isinstance(entries, dict):
            wrong.append(f"{section}: must have keys ({', '.join(_KEYS[section])}), got {entries!r}")
        else:
            entries = entries or {}  # `timeline:` without entries
            for key, value in entries.items():
                wrong += _apply(parsed, section, str(key), value)
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")


def _apply(parsed: argparse.Namespace, section: str, key: str, value: Any) -> list[str]:
    if value is None:
        return []
    obsolete = _OBSOLETE_KEYS.get(section, {}).get(key)
    if obsolete is not None:
        if value is not False and value != 0:
            _note(parsed, f"{section}.{key}", obsolete)
        return []
    dest = _KEYS[section].get(key)
    if dest is None:
        return [f"{section}.{key} is not one of {', '.join(_KEYS[section])}"]
    knob = next((knob for knob in KNOBS if knob.dest == dest), None)
    kind = bool if knob is None else knob.kind
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return [f"{section}.{key}={value!r} must be {'true or false' if kind is bool else f'of type {kind.__name__}'}"]
    if knob is not None and knob.choices:
        value = str(value).lower()
        if value not in knob.choices:
            return [f"{section}.{key}={value!r} is not one of {', '.join(knob.choices)}"]
    if getattr(parsed, dest) is None:
        setattr(parsed, dest, value)
    return []


def _note(parsed: argparse.Namespace, what: str, flag: str) -> None:
    parsed.notes = [*(parsed.notes or []), f"{what} has no effect: {OBSOLETE[flag][1]}"]
