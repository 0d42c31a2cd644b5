"""The pipeline: a program is read and done, action by action."""
