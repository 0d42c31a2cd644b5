"""What to choose: the space of plans, the search through it, uneven stages, and why the best plan is the best."""
