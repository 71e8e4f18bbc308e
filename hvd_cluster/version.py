"""The version of the package: a module of its own, so that launchers need not import the package's root."""

__version__ = "0.1.0"
