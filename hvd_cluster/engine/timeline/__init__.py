"""The timeline: every tensor on every rank, as Chrome trace events for Perfetto.

Each rank records its own events and sends them up the engine's tree. Rank 0 writes all events into one file, in which
each rank has a group of tracks, one for each tensor. Times are microseconds of the wall clock. The format is the JSON
array of the "Trace Event Format" document of the Chrome project.
"""

from hvd_cluster.engine.timeline.file import TimelineFile
from hvd_cluster.engine.timeline.job import JobTimeline
from hvd_cluster.engine.timeline.recorder import Record, Recorder

__all__ = ["JobTimeline", "Record", "Recorder", "TimelineFile"]
