"""The documents' claims, one module each, imported only when one is run."""

from innerloop.experiments.catalogue import load, modules

__all__ = ["load", "modules"]
