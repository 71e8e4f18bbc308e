"""Input pipelines of TensorFlow that run in processes of their own: helpers for the tf.data service."""
