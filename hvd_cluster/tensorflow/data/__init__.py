"""Helpers for the tf.data service, which runs TensorFlow input pipelines in separate processes."""
