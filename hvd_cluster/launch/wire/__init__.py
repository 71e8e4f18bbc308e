"""What launchers, agents and workers send each other.

The listener, the messages, flow control.
"""
