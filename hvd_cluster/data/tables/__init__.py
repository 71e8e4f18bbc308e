"""Tables of each format that can be read: Parquet, Arrow's data sets, Delta, Iceberg and Lance."""
