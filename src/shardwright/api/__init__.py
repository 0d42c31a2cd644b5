"""What Python programs and the command line call alike."""
