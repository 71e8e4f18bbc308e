"""Helpers for the tf.data service.

It runs TensorFlow input pipelines in separate processes.
"""
