"""Errors of petastorm data sets, under the names that petastorm's users catch."""

from __future__ import annotations

from hvd_cluster.errors import DataError


class NoDataAvailableError(DataError):
    """There are fewer row groups than shards, so that some shards would be empty."""


class PetastormMetadataError(DataError):
    """A data set's petastorm metadata is missing, untrusted or not understood."""


class PetastormMetadataGenerationError(DataError):
    """The metadata of a data set cannot be written.

    The data set holds no Parquet, or cannot be reached.
    """


class DecodeFieldError(DataError):
    """A stored value is not what its field says; the text names the field."""
