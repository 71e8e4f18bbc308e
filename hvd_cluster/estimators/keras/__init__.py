"""KerasEstimator, and how its workers train."""
