"""Starting workers: what all launchers share, the local launcher, and the ``hvdrun`` command."""
