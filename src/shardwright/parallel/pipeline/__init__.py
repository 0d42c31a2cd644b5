"""The pipeline: executes a program, action by action."""
