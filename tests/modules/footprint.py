"""What a process holds that a world which is over should have given back."""

from __future__ import annotations

import gc
import time
from pathlib import Path


def footprint() -> dict[str, int]:
    """How many threads (native ones too), descriptors and mappings of shared memory this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "segments": maps.count("memfd:hvd_cluster"),
    }


def left_over(before: dict[str, int], patience_s: float = 5.0) -> dict[str, int]:
    """What there is more of than ``before``; threads of native code may take a moment to end."""
    deadline_s = time.monotonic() + patience_s
    while True:
        more = {name: count - before[name] for name, count in footprint().items() if count > before[name]}
        if not more or time.monotonic() > deadline_s:
            return more
        time.sleep(0.05)
