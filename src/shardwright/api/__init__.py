"""Functions that Python programs and the command line call alike."""
