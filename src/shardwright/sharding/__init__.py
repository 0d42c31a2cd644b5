"""The holders of each part: the ranks of parameters, buffers and sequences. No torch here."""
