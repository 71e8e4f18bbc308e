"""How the workers of one job find and trust each other: a signed channel, a key-value store, the job's secret."""
