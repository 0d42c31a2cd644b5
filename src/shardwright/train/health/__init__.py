"""A watch over the health of a run."""
