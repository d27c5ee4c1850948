"""Generating responses: the engine seam, the engines behind it, and the record of a rollout."""
