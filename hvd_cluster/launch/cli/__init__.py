"""The command line: ``hvdrun``, also installed as ``horovodrun``."""
