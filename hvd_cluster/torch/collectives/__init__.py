"""The collectives on torch tensors, one file per kind.

They are blocking, asynchronous or in place; their gradients are here too.
"""
