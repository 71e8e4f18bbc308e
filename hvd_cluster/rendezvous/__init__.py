"""How the workers of one job find and trust each other: a signed channel, a key-value store, the job's secret.

Start reading at :mod:`~hvd_cluster.rendezvous.session`, the signed conversation without sockets. A *channel* speaks
it in code that may block, a *link* in event loops. The *store* is a *server*, which serves a *table*, and a *client*
in each worker; a *mailbox* is a queue in it, and *membership* a worker's place in an elastic job. Where the launcher
is not ours, *bootstrap* makes the *meeting*: ranks agree on a store through torchrun, the kernel, MPI
(*communicator*) or a *folder*.
"""
