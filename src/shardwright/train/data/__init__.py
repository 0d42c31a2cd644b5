"""From what the user names to samples of tokens."""
