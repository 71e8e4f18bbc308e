"""The collectives on TensorFlow tensors and their gradients, a file for each."""
