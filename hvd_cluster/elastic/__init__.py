"""Elastic training for every framework.

The state, the loop that restores it, and the driver's notifications.
"""
