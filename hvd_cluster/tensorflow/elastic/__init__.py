"""Elastic training with TensorFlow: ``@hvd.elastic.run`` and the states.

They are :class:`TensorFlowState` and :class:`TensorFlowKerasState`.
"""

from hvd_cluster.elastic.loop import run
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.tensorflow.elastic.state import TensorFlowKerasState, TensorFlowState

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
