"""Import hooks for old paths: one finder for each root that this process serves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hvd_cluster.oldpaths.forwarder import Forwarder
from hvd_cluster.oldpaths.table import TABLES, children_of, homes_of, row_of

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder


def shim_folder() -> str:
    """This machine's folder with the ``horovod`` package that imports compat.

    It also has Horovod's metadata.
    """
    return str(Path(__file__).parents[1] / "compat" / "shim")


class OldPathFinder(MetaPathFinder, Loader):
    """Serves ``root`` and every old path below it.

    New modules are imported when their old path is.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._table = TABLES[root]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an old path; None if other finders should look for it.

        Raises:
            ModuleNotFoundError: a path below an old one that no row serves.
        """
        below = self._below_root(fullname)
        if below is not None and below.endswith(".__main__"):
            return self._program(fullname, below.removesuffix(".__main__"))
        row = None if below is None else row_of(below, self._table)
        if row is None and below is not None and isinstance(sys.modules.get(fullname.rpartition(".")[0]), Forwarder):
            # Without name=: otherwise `from horovod.spark import conf` would replace this text by Python's own.
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: hvd_cluster serves no such path of {self._owner}'s. "
                f"{self._instead(below)}; docs/migrating.md and hvd_cluster.oldpaths.table list all of them"
            )
        if row is None or row.module == fullname:  # the new path itself: its file is missing
            return None
        return ModuleSpec(fullname, self, origin=row.module or None, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        below = self._below_root(spec.name)
        row = None if below is None else row_of(below, self._table)
        if below is None or row is None:
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
        return Forwarder(spec.name, below, row, self._table)

    def exec_module(self, module: ModuleType) -> None:
        # So that `try: import horovod.tensorflow` fails if the framework is not installed.
        if module.__spec__ is not None and module.__spec__.origin:
            importlib.import_module(module.__spec__.origin)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """Horovod's metadata for ``importlib.metadata``.

        Child processes find it in the folder on their path.
        """
        if self.root != "horovod" or shim_folder() in sys.path:
            return ()
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        inside = DistributionFinder.Context(name=context.name, path=[shim_folder()])
        return MetadataPathFinder.find_distributions(inside)

    def _program(self, fullname: str, below: str) -> ModuleSpec | None:
        """What ``python -m`` runs for an old path.

        It imports ``__main__`` of it because all old paths are packages.
        """
        row = row_of(below, self._table)
        program = None if row is None or not row.module else find_spec(row.module)
        if program is None or program.origin is None:
            return None
        return spec_from_file_location(fullname, program.origin)

    def _instead(self, below: str) -> str:
        """The served paths most like one that is not served.

        Of a name, which `from` imports, also where it is now.
        """
        parent, _, name = below.rpartition(".")
        homes = homes_of(name, self._table) if parent else []
        near = [] if homes else get_close_matches(below, filter(None, self._table))
        near = near or [".".join(filter(None, (parent, child))) for child in sorted(children_of(parent, self._table))]
        near = near or [parent]  # a module without others below it
        paths = ", ".join(f"{self.root}.{path}" for path in near)
        return f"{name!r} is in {' and in '.join(homes)}" if homes else f"The nearest that it serves: {paths}"

    @property
    def _owner(self) -> str:
        return "Horovod" if self.root in ("horovod", "hvd_cluster") else self.root

    def _below_root(self, fullname: str) -> str | None:
        if fullname == self.root:
            return ""
        return fullname[len(self.root) + 1 :] if fullname.startswith(f"{self.root}.") else None


def serve(root: str, *, first: bool) -> None:
    """Serve ``root``, before (``first``) or after what is on ``sys.path``.

    Further calls have no effect.
    """
    if not serves(root):
        sys.meta_path.insert(0 if first else len(sys.meta_path), OldPathFinder(root))


def serves(root: str) -> bool:
    """Whether this process serves ``root``."""
    return any(isinstance(finder, OldPathFinder) and finder.root == root for finder in sys.meta_path)
