"""Process groups and collectives, with their watch and their account."""
