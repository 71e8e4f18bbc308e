"""Estimators and models as stages of Spark ML, with and without pyspark."""
