"""What workers of every framework share in a run: data, clock, reports, files."""
