"""petastorm's index of row groups: read from a data set's metadata, asked by a selector."""

from __future__ import annotations

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import index_pickle, metadata
from hvd_cluster.petastorm.errors import PetastormMetadataError
from hvd_cluster.petastorm.index_pickle import RowGroupIndex
from hvd_cluster.petastorm.location import Location
from hvd_cluster.petastorm.selectors import RowGroupSelectorBase


def read(location: Location) -> dict[str, RowGroupIndex]:
    """Name -> index.

    Raises:
        PetastormMetadataError: the data set has none, or it is refused.
    """
    pickled = metadata.read(location).get(metadata.INDEX_KEY)
    if pickled is None:
        raise PetastormMetadataError(f"{location.text} has no index of row groups: use filters, or a predicate")
    return index_pickle.loads(pickled)


def selected(location: Location, selector: RowGroupSelectorBase) -> set[int]:
    """The numbers of the row groups that a selector picks.

    Raises:
        DataError: there is no such index.
    """
    indexes = read(location)
    missing = [name for name in selector.get_index_names() if name not in indexes]
    if missing:
        raise DataError(f"{location.text} has no index {missing}: it has {sorted(indexes)}")
    return selector.select_row_groups(indexes)
