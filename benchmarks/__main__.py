"""``make bench``: run every benchmark, or those that are named, and write benchmarks/README.md."""

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

NAMES = [
    "allreduce",
    "small_tensors",
    "training_step",
    "tf_training_step",
    "two_hosts",
    "transports",
    "control_plane",
    "scaling_model",
    "autotune",
    "startup",
    "ray_overhead",
    "commit",
    "gpu_overhead",
    "reader",
    "data_wait",
    "transform",
    "fit_overhead",
]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args(arguments).names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}; there are {', '.join(NAMES)}")
    deadline_s = time.monotonic() + 60
    while os.getloadavg()[0] > 0.5 and time.monotonic() < deadline_s:
        time.sleep(5)
    parts = [f"Measured {conditions()} A load above 0.5 means that others were using the machine: run it again.\n"]
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        with _nothing_on_stdout():
            table = module.measure()
        text = f"{table.markdown()}\n`benchmarks/{name}.py`: {module.__doc__.strip()}\n"
        print(text, flush=True)
        parts.append(text)
    if names == NAMES:
        head = (
            "# Benchmarks\n\nOurs and the peer take turns in one run; medians, and the ratio peer / ours. `make bench` "
        )
        target = Path(__file__).with_name("README.md")
        target.write_text(head + "writes this page.\n\n" + "\n".join(parts))
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
