"""Jobs whose workers come and go: discovery of hosts, the policy, and the driver that carries it out."""
