"""What a host's ranks share: memory, semaphores in it, and agreement through it."""
