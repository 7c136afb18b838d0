"""Language models of the layers: one configuration, one plain PyTorch model, one state."""

from innerloop.lm.config import Config
from innerloop.lm.model import LanguageModel
from innerloop.lm.pattern import Entry, parse
from innerloop.lm.state import State

__all__ = ["Config", "Entry", "LanguageModel", "State", "parse"]
