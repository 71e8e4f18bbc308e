"""What each worker holds of a model, and when workers exchange updates.

The params ``sharding=`` and ``communication=`` choose both.
"""
