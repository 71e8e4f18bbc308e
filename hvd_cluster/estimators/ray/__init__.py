"""Ray Datasets in and out of estimators, and fits on Ray."""
