"""Loading and calling the networks: the trained policy with its value head, and its frozen reference."""
