"""Gates, one in each file: the choice of experts for each token, and their weights."""
