"""Spark DataFrames in and out of estimators."""
