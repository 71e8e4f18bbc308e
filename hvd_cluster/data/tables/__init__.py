"""Readable tables: Parquet, Arrow's data sets, Delta, Iceberg and Lance."""
