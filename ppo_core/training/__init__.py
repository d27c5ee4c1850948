"""What turns rollouts into gradient steps: the engine seam, microbatches, the passes and the updates."""
