"""One table of settings for each other system, read in both directions, with the defaults of its releases."""
