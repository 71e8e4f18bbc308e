"""Checksums of Parquet pages, as arguments for pyarrow: release 15 and later have them."""

from __future__ import annotations

from hvd_cluster.data.optional import load_pyarrow


def written() -> dict[str, bool]:
    """The argument of a ``ParquetWriter`` that writes them, if there is one."""
    return {"write_page_checksum": True} if _are_available() else {}


def verified() -> dict[str, bool]:
    """The argument of a ``ParquetFile`` that verifies them, if there is one."""
    return {"page_checksum_verification": True} if _are_available() else {}


def _are_available() -> bool:
    return int(load_pyarrow().__version__.partition(".")[0]) >= 15
