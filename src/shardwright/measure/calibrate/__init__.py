"""Measure the machine that this runs on: operators, collectives, memory, and the file that says so."""
