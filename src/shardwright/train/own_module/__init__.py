"""Data parallel and ZeRO for a user's own module."""
