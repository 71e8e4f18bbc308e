"""Starting workers: what all launchers share, the local launcher, and the ``hvdrun`` command.

Start reading at :func:`hvd_cluster.launch.job.run_job`: a job of a fixed number of workers from end to end. Its
nouns: a *task* is what every worker is to do, a user's command (*program*) or a packed function (*call*); a *group*
is the workers that start and end together; the *fleet* is the job's hosts, connected; an *agent* is our process on
another host, which starts the workers there, and a *remote* is the launcher's view of it; the *switchboard* starts
the agents through ssh, and the *door* is the port at which they call back; *placement* turns seats on hosts into
ranks; an *outcome* is how one worker ended. ``cli/`` is hvdrun's command line, ``local.py`` the launcher for this
host alone.
"""
