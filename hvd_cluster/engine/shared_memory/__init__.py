"""What the ranks of one host share: the memory, semaphores in it, and agreement through it."""
