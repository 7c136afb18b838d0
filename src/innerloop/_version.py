"""The version, kept apart so that the build and the command line read it without importing torch."""

__version__ = "0.1.0"
