"""Why the best plan is the best, and what else would do."""
