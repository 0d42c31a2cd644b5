"""Schedules that are searched for."""
