"""Starting workers: what all launchers share, the local launcher, and the ``hvdrun`` command.

Start reading at :func:`hvd_cluster.launch.job.run_job`: a job of a fixed number of workers from end to end. Its
nouns: a *task* is what every worker is to do, a user's command (*program*) or a packed function (*call*); a *group*
is the workers that start and end together; the *fleet* is the job's hosts, connected; an *agent* is our process on
another host, which starts the workers there, and a *remote* is the launcher's view of it; the *agent_hub* starts
the agents through ssh, and the *listener* is the port to which they connect back; *placement* turns slots on hosts into
ranks; an *outcome* is how one worker ended. ``cli/`` is hvdrun's command line, ``local.py`` the launcher for this
host alone.
"""
