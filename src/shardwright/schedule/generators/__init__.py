"""The schedules, one a file."""
