"""Sequence layers that learn while they run."""
