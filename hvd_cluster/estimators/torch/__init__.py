"""TorchEstimator, and what its workers do."""
