"""Jobs that may lose and gain workers: discovery, policy and controller.

Start reading at :func:`hvd_cluster.launch.job.run_job`. The *discovery* lists the available hosts; the
*host manager* connects them and keeps a *blacklist*. The *policy* is pure and decides what to do next; the *controller*
does it. An *elastic worker* is one worker as the controller sees it. The *announcer* sends the workers their ranks and
notifications; :mod:`hvd_cluster.rendezvous.membership` and :mod:`hvd_cluster.elastic` handle them in the workers.
"""
