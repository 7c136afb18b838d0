"""The ``innerloop`` command. Nothing here imports torch before a command needs it."""

from innerloop.cli.main import main

__all__ = ["main"]
