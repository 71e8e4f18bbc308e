"""The metadata of a petastorm data set: ``_common_metadata``.

It holds the pickled schema beside Arrow's own.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.reading.parquet_files import footers_of
from hvd_cluster.errors import DataError
from hvd_cluster.petastorm import schema_pickle
from hvd_cluster.petastorm.errors import PetastormMetadataError, PetastormMetadataGenerationError
from hvd_cluster.petastorm.fragments import parquet_files
from hvd_cluster.petastorm.location import Location, Url, locate
from hvd_cluster.petastorm.unischema import Unischema

FILE = "_common_metadata"
#: Another file that may hold the same keys, written by Spark's own summaries.
_SUMMARY = "_metadata"
SCHEMA_KEY = b"dataset-toolkit.unischema.v1"
#: JSON: path of a file below the folder -> its number of row groups.
ROW_GROUPS_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
INDEX_KEY = b"dataset-toolkit.rowgroups_index.v1"


def read(location: Location) -> dict[bytes, bytes]:
    """The keys and values of a data set's metadata; {} where there is none.

    Raises:
        PetastormMetadataError: the file is damaged.
    """
    parquet = load_pyarrow("pyarrow.parquet")
    values: dict[bytes, bytes] = {}
    for name in (_SUMMARY, FILE):
        content = location.read(name)
        if content is None:
            continue
        try:
            values.update(parquet.read_metadata(io.BytesIO(content)).metadata or {})
        except (OSError, ValueError) as error:
            raise PetastormMetadataError(f"{location.folder}/{name} is damaged: {error}") from error
    return values


def stored_schema(location: Location) -> Unischema | None:
    """The schema that petastorm, or we, wrote; None where there is none.

    Raises:
        PetastormMetadataError: it is damaged, or its pickle asks for more than a schema.
    """
    pickled = read(location).get(SCHEMA_KEY)
    if pickled is None:
        return None
    try:
        return schema_pickle.loads(pickled)
    except PetastormMetadataError as error:
        raise PetastormMetadataError(f"{location.text}: {error}") from error


def get_schema_from_dataset_url(
    dataset_url_or_urls: Url | Sequence[Url],
    hdfs_driver: str = "libhdfs",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> Unischema:
    """The schema of a petastorm data set.

    Args:
        dataset_url_or_urls: path or URL of the folder, or a list of those of files in it.
        hdfs_driver: ignored: pyarrow has one driver only.
        storage_options, filesystem: as :func:`hvd_cluster.petastorm.location.locate` takes them.

    Raises:
        PetastormMetadataError: there is no schema, or one that is refused.
    """
    location = locate(dataset_url_or_urls, storage_options, filesystem)
    schema = stored_schema(location)
    if schema is None:
        raise PetastormMetadataError(
            f"{location.text} has no petastorm schema in {FILE}: read it with make_batch_reader, or write it with "
            "materialize_dataset or write_dataset"
        )
    return schema


def generate(location: Location, schema: Unischema) -> None:
    """Write ``_common_metadata`` beside Parquet files that are already there.

    What else it held stays.

    Args:
        location: the folder.
        schema: of the rows, before encoding.

    Raises:
        PetastormMetadataGenerationError: there is no Parquet, or its columns are not those of the schema.
    """
    try:
        files = parquet_files(location)
        footers = footers_of(location.filesystem, [path for path, _ in files])
    except DataError as error:
        raise PetastormMetadataGenerationError(str(error)) from error
    arrow_schema = footers[0].schema.to_arrow_schema()
    named = {part.split("=", 1)[0] for _, below in files for part in below.split("/")[:-1] if "=" in part}
    missing = [name for name in schema.fields if name not in arrow_schema.names and name not in named]
    if missing:
        raise PetastormMetadataGenerationError(
            f"the schema has fields {missing}, which the Parquet files in {location.text} lack: they have "
            f"{arrow_schema.names}"
        )
    counts = {below: footer.num_row_groups for (_, below), footer in zip(files, footers, strict=True)}
    # pyarrow writes its own key again; an index of row groups would be of other ones.
    kept = {key: value for key, value in read(location).items() if key not in {b"ARROW:schema", INDEX_KEY}}
    own = {SCHEMA_KEY: schema_pickle.dumps(schema), ROW_GROUPS_KEY: json.dumps(counts).encode()}
    stream = io.BytesIO()
    described = arrow_schema.with_metadata({**(arrow_schema.metadata or {}), **kept, **own})
    load_pyarrow("pyarrow.parquet").write_metadata(described, stream)
    location.write(FILE, stream.getvalue())
