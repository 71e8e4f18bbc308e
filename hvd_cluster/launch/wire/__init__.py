"""What launchers, agents and workers send each other: the listener, the messages, flow control."""
