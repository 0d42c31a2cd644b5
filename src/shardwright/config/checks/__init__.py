"""Checks that the fields of a job agree. Every fault has its arithmetic and a way out."""
