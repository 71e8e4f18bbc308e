"""Starting workers: what launchers share, the local launcher, ``hvdrun``.

Start reading at :func:`hvd_cluster.launch.job.run_job`. A *task* is what every worker runs: a user's command or a
packed function (``call.py``). A *worker group* is the workers that start and end together. A *fleet* is the hosts of a
job; an *agent* is our process on another host, which starts the workers there, and a *remote host* is the launcher's
view of that host. *Placement* assigns ranks to slots. An *outcome* is how one worker ended. ``ssh/`` reaches other
hosts through ssh, ``wire/`` has the messages between processes, ``elastic/`` is for jobs whose workers change, ``cli/``
is hvdrun's command line, and ``local.py`` is the launcher for this host alone.
"""
