from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cluster.launch.cli.config import apply_config
from hvd_cluster.launch.cli.knobs import knob_environment
from hvd_cluster.launch.cli.main import parse_args

EVERYTHING = """\
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: true
  log_file: horovod_autotune_log.txt
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
"""


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.yaml").write_text(text)
    return str(tmp_path / "config.yaml")


def test_everything_that_a_file_may_say_reaches_the_workers(tmp_path: Path) -> None:
    parsed = parse_args(["-np", "2", "train"])
    apply_config(parsed, config(tmp_path, EVERYTHING))
    assert parsed.notes is None
    assert knob_environment(parsed) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "5.0",
        "HOROVOD_CACHE_CAPACITY": "2048",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "horovod_autotune_log.txt",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9",
        "HOROVOD_TIMELINE": "timeline.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120.0",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240.0",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60.0",
        "HOROVOD_LOG_LEVEL": "info",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }


def test_what_the_command_line_says_wins(tmp_path: Path) -> None:
    parsed = parse_args(["--cycle-time-ms", "3", "--no-autotune", "train"])
    apply_config(parsed, config(tmp_path, EVERYTHING))
    assert (parsed.cycle_time_ms, parsed.autotune, parsed.cache_capacity) == (3.0, False, 2048)


def test_what_makes_no_sense_any_more_costs_a_line_each(tmp_path: Path) -> None:
    parsed = parse_args(["train"])
    text = (
        "controller: mpi\nparams: {torus_allreduce: true}\nlibrary_options: {num_nccl_streams: 2, thread_affinity: 0}\n"
    )
    apply_config(parsed, config(tmp_path, text))
    assert [note.partition(" has no effect")[0] for note in parsed.notes] == [
        "controller: mpi",
        "params.torus_allreduce",
        "library_options.num_nccl_streams",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "params: {cycle: 1}\nlogging: {level: loud}",
            r"params.cycle is not one of .*; logging.level='loud' is not one of",
        ),
        (
            "params: {cycle_time_ms: soon, cache_capacity: 1.5}",
            "cycle_time_ms='soon' must be of type float; .*=1.5 must be of type int",
        ),
        ("autotune: {enabled: 1}", "autotune.enabled=1 must be true or false"),
        ("timeline: trace.json", "timeline: must have keys \\(filename, mark_cycles\\), got 'trace.json'"),
        ("parameters: {}", "parameters: is not one of the sections controller, params"),
        ("- a\n- b", "must have sections"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_no_flag_could_say_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        apply_config(parse_args(["train"]), config(tmp_path, text))


def test_a_section_whose_lines_are_all_comments_says_nothing(tmp_path: Path) -> None:
    parsed = parse_args(["train"])
    apply_config(parsed, config(tmp_path, "timeline:\n  # filename: trace.json\nparams: {cycle_time_ms: 2}\n"))
    assert knob_environment(parsed) == {"HOROVOD_CYCLE_TIME": "2.0"}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    apply_config(parse_args(["train"]), config(tmp_path, "# nothing\n"))
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        apply_config(parse_args(["train"]), str(tmp_path / "nowhere"))
