"""Other hosts, reached through ssh: its options, the connection to one host, and to all hosts of a job."""
