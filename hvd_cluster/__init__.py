"""Horovod's promise on today's stack: one training function, every GPU of a Spark or Ray cluster."""

from __future__ import annotations

__version__ = "0.1.0"
