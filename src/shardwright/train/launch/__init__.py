"""Starts, watches and ends ranks."""
