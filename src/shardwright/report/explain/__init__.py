"""One step of a job, explained as text and tables."""
