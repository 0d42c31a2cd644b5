"""Checkpoints: what a run needs to go on, in boxes that any other plan can read."""
