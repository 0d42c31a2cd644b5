"""Was it so? Runs are compared with what they should have been."""
