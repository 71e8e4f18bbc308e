"""The collectives on torch tensors, one file per kind: blocking, asynchronous, in place, and their gradients."""
