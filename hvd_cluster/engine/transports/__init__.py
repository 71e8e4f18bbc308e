"""Transports of bytes: one small interface, and a file for each way to move them."""
