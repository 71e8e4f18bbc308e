"""Elastic training for every framework: the state, the loop that restores it, and the driver's notifications."""
