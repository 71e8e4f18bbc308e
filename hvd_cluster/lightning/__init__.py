"""Lightning 2 on Horovod's collectives: ``Trainer(strategy=HorovodStrategy())``, or ``strategy="horovod"``.

Importing this package registers the name; :mod:`hvd_cluster.oldpaths.strategy_hook` does so in programs that do not.
Under the name, which Lightning 1 knew, the learning rate is scaled as there.
"""

from __future__ import annotations

from hvd_cluster.lightning.environment import HorovodEnvironment
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.lightning.strategy import HorovodStrategy
from hvd_cluster.lightning.sync_batch_norm import HorovodSyncBatchNorm

__all__ = ["HorovodEnvironment", "HorovodStrategy", "HorovodSyncBatchNorm"]

submodule("strategies").StrategyRegistry.register(
    HorovodStrategy.strategy_name,
    HorovodStrategy,
    description="One worker of hvdrun, spark.run, ray or local.run each; gradients through hvd.DistributedOptimizer",
    override=True,
    scale_lr=True,
)
