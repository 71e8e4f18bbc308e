"""LightningEstimator, and what its workers do."""
