"""What every framework's elastic shares: the state that survives, the loop that restores it, the driver's news."""
