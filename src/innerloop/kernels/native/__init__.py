"""Compiled kernels of the families of rules, and the library that holds them."""

from innerloop.kernels.native.family import Native, Values
from innerloop.kernels.native.library import as_read, instruction_set, missing
from innerloop.kernels.native.scalar import Scalar

__all__ = ["Native", "Scalar", "Values", "as_read", "instruction_set", "missing"]
