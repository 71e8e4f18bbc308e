"""What this process spends its time on: live steps, calls that take long, stacks, and what slows a job down."""
