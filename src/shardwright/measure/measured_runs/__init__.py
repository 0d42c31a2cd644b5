"""Published runs: a table of them, read strictly, row by row."""
