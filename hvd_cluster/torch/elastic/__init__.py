"""Elastic training with torch: ``run``, ``TorchState`` and ``ElasticSampler``."""

from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.torch.elastic.sampler import ElasticSampler
from hvd_cluster.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
