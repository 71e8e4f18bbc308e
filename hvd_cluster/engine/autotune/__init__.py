"""Autotune: the fusion threshold and the cycle time that make a training step shortest, found while the job trains.

Rank 0 watches the buckets that it carries out, fits what the transport costs, computes which parameters would be best,
and tries those. All of it is pure: the engine tells the :class:`Tuner` what happened, and applies what it answers on
all ranks at one place of the log.
"""

from hvd_cluster.engine.autotune.observation import Observation, Parameters
from hvd_cluster.engine.autotune.tuner import Tuner

__all__ = ["Observation", "Parameters", "Tuner"]
