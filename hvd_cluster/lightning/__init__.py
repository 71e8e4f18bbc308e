"""Lightning 2 on Horovod's collectives.

Use ``Trainer(strategy=HorovodStrategy())``, or ``strategy="horovod"``. Importing this package registers the name;
:mod:`hvd_cluster.oldpaths.strategy_hook` registers it in programs that do not import it. By name, the strategy scales
the learning rate, as in Lightning 1.
"""

from __future__ import annotations

from hvd_cluster.lightning.environment import HorovodEnvironment
from hvd_cluster.lightning.installed import submodule
from hvd_cluster.lightning.strategy import HorovodStrategy
from hvd_cluster.lightning.synced_modules import HorovodSyncBatchNorm

__all__ = ["HorovodEnvironment", "HorovodStrategy", "HorovodSyncBatchNorm"]

submodule("strategies").StrategyRegistry.register(
    HorovodStrategy.strategy_name,
    HorovodStrategy,
    description="On the workers of hvdrun, spark.run, Ray or local.run, with hvd.DistributedOptimizer",
    override=True,
    scale_lr=True,
)
