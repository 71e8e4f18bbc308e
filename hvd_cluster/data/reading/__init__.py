"""Rows on their way out of a data set: which, in what order, read ahead.

They come as tensors.
"""
