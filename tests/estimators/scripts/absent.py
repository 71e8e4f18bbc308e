"""Makes packages impossible to find, as if they were not installed."""

import sys


class _Without:
    """Wraps a finder, and hides some packages from it."""

    def __init__(self, finder, names):
        self._finder = finder
        self._names = names

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self._names else self._finder.find_spec(name, path, target)


def block(*names):
    already = [name for name in names if name in sys.modules]
    if already:
        raise RuntimeError(f"{already} were imported before they could be blocked")
    sys.meta_path[:] = [_Without(finder, names) for finder in sys.meta_path]
