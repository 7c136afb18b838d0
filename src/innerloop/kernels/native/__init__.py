"""Compiled kernels of the families of rules, and the library that holds them."""

from innerloop.kernels.native.channel import Channel
from innerloop.kernels.native.family import Native
from innerloop.kernels.native.library import instruction_set, missing
from innerloop.kernels.native.scalar import Scalar

__all__ = ["Channel", "Native", "Scalar", "instruction_set", "missing"]
