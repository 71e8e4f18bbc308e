"""How the workers of one job find and authenticate each other.

Start with :mod:`~hvd_cluster.rendezvous.session`, the signed protocol without sockets. A *channel* implements it for
code that may block, a *link* for event loops. The key-value store is a *server*, which serves a *table*, and a
*client* in each worker; a *mailbox* is a queue in the store, and *membership* is a worker's part in an elastic job.
Where another launcher started the ranks, *bootstrap* lets them agree on a store through torchrun, the kernel, MPI
(*communicator*) or a shared *folder*.
"""
