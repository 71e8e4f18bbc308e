"""The collectives on torch tensors, a file for each kind: blocking, asynchronous, in place, and their gradients."""
