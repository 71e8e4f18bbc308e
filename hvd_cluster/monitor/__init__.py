"""What this process spends its time on: steps, long calls, stacks.

And what slows a job down.
"""
