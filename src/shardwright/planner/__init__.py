"""The choice of a plan: the space of plans, the search through it, uneven stages, and the reasons."""
