"""The reasons why a plan is best, and the alternatives to it."""
