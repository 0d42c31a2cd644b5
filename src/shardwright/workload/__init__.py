"""What is computed and communicated in a step, without torch and without ranks."""
