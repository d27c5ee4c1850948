"""Held-out answers, what the reward and the judge make of them, and the gate between the two."""
