"""The collectives on TensorFlow tensors, a file for each kind, with their gradients."""
