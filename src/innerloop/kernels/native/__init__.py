"""Compiled kernels of the families of rules, and the library that holds them."""

from innerloop.kernels.native.channel import Channel
from innerloop.kernels.native.family import Kernel, Native, Values
from innerloop.kernels.native.library import instruction_set, missing
from innerloop.kernels.native.momentum import Momentum
from innerloop.kernels.native.scalar import Scalar

__all__ = ["Channel", "Kernel", "Momentum", "Native", "Scalar", "Values", "instruction_set", "missing"]
