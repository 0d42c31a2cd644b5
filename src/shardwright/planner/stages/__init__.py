"""Uneven stages, and stages on devices of different kinds."""
