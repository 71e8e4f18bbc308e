"""Collectives: what all ranks agree to do, and who moves the bytes.

Start reading at :func:`hvd_cluster.engine.engine.Engine.submit`, the only way in. A *request* is what one rank asks
for, and its *signature* is what all ranks must agree on. Pure parts decide: *negotiation* (over a *tree* of hosts, each
with a *ballot* in shared memory), *fusion* of small requests into buckets, and *disagreement*, the errors where
ranks differ. One thread at a time acts: the holder of the *progress lock* runs the *loop*, which hands decided buckets
to the *execution*; the *transports* move the bytes. :mod:`~hvd_cluster.engine.basics` holds the one engine of this
process, and :mod:`~hvd_cluster.engine.world` connects its ranks when it starts.
"""
