"""The faults put in by hand, a file a family."""
