"""Jobs whose workers come and go: discovery of hosts, the policy, and the driver that carries it out.

Start reading at :func:`hvd_cluster.launch.elastic.job.run_elastic`. The *discovery* says which hosts there are, the
*host manager* connects them and keeps a *blacklist*; the *policy* is pure and decides what to do next, the *driver*
does it; a *member* is one worker as the driver sees it, and *seating* gives the members of a new world their ranks.
The *announcer* tells the workers; what they do then is in :mod:`hvd_cluster.rendezvous.membership` and
:mod:`hvd_cluster.elastic`.
"""
