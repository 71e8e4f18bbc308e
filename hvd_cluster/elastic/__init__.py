"""Elastic training for every framework: the state, the loop that restores it, the driver's notifications."""
