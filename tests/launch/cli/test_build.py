from __future__ import annotations

import importlib.util

import torch.distributed

from hvd_cluster.launch.cli.build import build_report


def test_the_report_shows_what_is_there() -> None:
    marks = {line[8:]: line[5] == "X" for line in build_report().splitlines() if line.startswith("    [")}
    operations = build_report().partition("Operations:")[2]
    assert ("[X] NCCL" in operations) == torch.distributed.is_nccl_available()
    assert ("[X] Gloo" in operations) == torch.distributed.is_gloo_available()
    assert marks["PyTorch"] == (importlib.util.find_spec("hvd_cluster.torch") is not None)
    assert not marks["MPI"]


def test_the_report_has_the_form_that_programs_read() -> None:
    lines = build_report().splitlines()
    assert lines[1] == "Horovod v0.28.1:"
    for title in ("Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"):
        assert title in lines
