"""The data of a run: from data.path to samples of tokens."""
