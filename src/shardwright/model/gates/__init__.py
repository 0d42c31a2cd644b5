"""Gates, one a file: which experts each token gets, and with what weights."""
