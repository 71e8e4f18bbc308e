"""``make bench``: run every benchmark and write benchmarks/README.md; or print what those that are named find."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import conditions
from benchmarks.page import page, section, sections

NAMES = [
    "allreduce",
    "small_tensors",
    "training_step",
    "torch_backend",
    "tf_training_step",
    "monitor",
    "slow_jobs",
    "two_hosts",
    "slow_link",
    "large_model",
    "transports",
    "control_plane",
    "scaling_model",
    "autotune",
    "startup",
    "ray_overhead",
    "commit",
    "gpu_overhead",
    "reader",
    "tables",
    "images",
    "data_wait",
    "fit_throughput",
    "transform",
    "fit_overhead",
    "preprocess",
]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--write", action="store_true", help="write what the named ones find in its place of the page")
    parsed = parser.parse_args(arguments)
    names = parsed.names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    deadline_s = time.monotonic() + 180
    while os.getloadavg()[0] > 0.5 and time.monotonic() < deadline_s:
        time.sleep(5)
    where_and_when = conditions()
    found: dict[str, str] = {}
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        with _nothing_on_stdout():
            table = module.measure()
        if table is None:
            print(f"{name}: not measured, because this machine lacks what it needs; the page keeps its earlier figures")
            continue
        found[name] = section(name, table.markdown(), module.__doc__ or "", where_and_when)
        print(found[name], flush=True)
    if names is NAMES or parsed.write:
        target = Path(__file__).with_name("README.md")
        earlier = sections(target.read_text()) if target.exists() else {}
        target.write_text(page(earlier | found, NAMES))
        print(f"written: {target}")


@contextlib.contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Whatever the workers and their JVMs write goes to stderr: stdout has the tables alone, and can be kept."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main(sys.argv[1:])
