"""Process groups, collectives, and what watches and counts them."""
