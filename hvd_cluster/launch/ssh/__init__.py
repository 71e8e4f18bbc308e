"""Other hosts, reached through ssh.

Its options, the connection to one host, and to all hosts of a job.
"""
