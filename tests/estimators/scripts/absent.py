"""Makes packages impossible to import, as if they were not installed."""

import sys


class _Absent:
    def __init__(self, names):
        self._names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def block(*names):
    already = [name for name in names if name in sys.modules]
    if already:
        raise RuntimeError(f"{already} were imported before they could be blocked")
    sys.meta_path.insert(0, _Absent(names))
