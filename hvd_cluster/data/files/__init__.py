"""Where bytes lie, and how they move."""
