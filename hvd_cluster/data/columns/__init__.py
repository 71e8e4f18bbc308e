"""What one column holds, in Arrow, in NumPy and in Spark ML."""
