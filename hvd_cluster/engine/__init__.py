"""Collectives: what all ranks agree to do, and who moves the bytes.

Pure parts decide (:mod:`~hvd_cluster.engine.negotiation`, :mod:`~hvd_cluster.engine.fusion`,
:mod:`~hvd_cluster.engine.tree`), one thread acts (:mod:`~hvd_cluster.engine.engine`), and
:func:`~hvd_cluster.engine.engine.Engine.submit` is the only way in.
"""
