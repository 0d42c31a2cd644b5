"""Jobs as other training systems write them: a table for each of their settings, read in both directions."""
