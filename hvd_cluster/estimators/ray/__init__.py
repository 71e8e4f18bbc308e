"""Fits of Ray Datasets, and fits on Ray."""
