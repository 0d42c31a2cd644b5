"""Who holds what: ranks, parameters, buffers and sequences. No torch here."""
