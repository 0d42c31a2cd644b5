"""Optimizers: updates of each element by itself, and updates of matrices whose rows lie on several ranks."""
