"""Checkpoints: the state that a run needs to resume, in boxes that a run of any plan can read."""
