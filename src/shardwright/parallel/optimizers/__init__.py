"""Optimizers: what is done with each element, and what is done with matrices whose rows lie on several ranks."""
