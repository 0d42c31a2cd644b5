"""The space of plans, and the search through it."""
