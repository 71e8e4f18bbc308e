"""KerasEstimator, and what its workers do."""
