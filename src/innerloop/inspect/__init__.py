"""Looking inside: what a memory wrote and when, how long it stays, and which token a read returns."""

from innerloop.inspect.figure import draw
from innerloop.inspect.model import Call, inspect_layer, inspect_model, recording
from innerloop.inspect.network import trace_network
from innerloop.inspect.trace import Trace, trace

__all__ = ["Call", "Trace", "draw", "inspect_layer", "inspect_model", "recording", "trace", "trace_network"]
