"""Rows on their way into a data set: checked, split, written whole or not at all."""
