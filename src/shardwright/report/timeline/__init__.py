"""Timelines and tables of schedules: terminal, picture, page and trace."""
