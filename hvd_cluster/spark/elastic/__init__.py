"""Elastic jobs on Spark: workers come and go with the tasks that carry them."""
