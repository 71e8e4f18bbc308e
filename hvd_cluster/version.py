"""The version of the package.

In its own module so that launchers need not import the package's root.
"""

__version__ = "1.0.0rc1"
