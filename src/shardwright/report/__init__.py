"""Show it: timelines in the terminal, as a page, as a picture, as a trace; schedules as a table."""
