"""Autotune: finds the best fusion threshold and cycle time while the job trains.

Rank 0 observes the buckets that it executes, fits a cost model of the transport, computes which parameters would be
best, and tries them. All of this is pure: the engine reports what happened to the :class:`Tuner`, and applies its
parameters on all ranks at the same position of the log.
"""

from hvd_cluster.engine.autotune.observation import Observation, Parameters
from hvd_cluster.engine.autotune.tuner import Tuner

__all__ = ["Observation", "Parameters", "Tuner"]
