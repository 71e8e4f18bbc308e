"""``hvdrun timeline FILE``: a timeline as a table and a picture.

The table is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_cluster.engine.timeline import picture, summary, trace
from hvd_cluster.errors import MissingExtraError

_USAGE_ERROR = 2


def main(arguments: Sequence[str], *, prog: str = "hvdrun") -> int:
    """Print the summary, write the picture, and return the exit code.

    It is 0, or 2 for a file that is not a timeline.
    """
    parser = argparse.ArgumentParser(
        prog=f"{prog} timeline",
        description="Summarise a timeline: time per phase, the slowest rank, communication during backward.",
    )
    parser.add_argument("file", help="the file that HOROVOD_TIMELINE or --timeline-filename named")
    parser.add_argument("--picture", metavar="PNG", help="file for the picture; by default next to FILE")
    parser.add_argument("--no-picture", action="store_true", help="write no picture")
    parsed = parser.parse_args(arguments)
    try:
        found = trace.read(parsed.file)
    except (OSError, ValueError) as error:
        print(f"{prog} timeline: {error}", file=sys.stderr)
        return _USAGE_ERROR
    if not found.spans:
        print(f"{prog} timeline: {parsed.file} has no operations yet", file=sys.stderr)
        return _USAGE_ERROR
    numbers = summary.summarize(found)
    print(summary.table(numbers))
    if not parsed.no_picture:
        target = parsed.picture or Path(parsed.file).with_suffix(".png")
        try:
            picture.draw(found, numbers, target)
            print(f"Picture: {target}")
        except ImportError:
            print(f"No picture: {MissingExtraError('matplotlib', 'plot', 'to draw it')}", file=sys.stderr)
        except OSError as error:
            print(f"No picture: {error}", file=sys.stderr)
    return 0
