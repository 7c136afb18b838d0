"""What a layer can hold and compute: trained on one task at one budget, and judged at that length and beyond."""

from innerloop.probe.board import Board, Plan
from innerloop.probe.contender import Contender, contender
from innerloop.probe.model import ProbeModel
from innerloop.probe.summary import Summary, markdown, summarised
from innerloop.probe.trial import Budget, Row, judge, train, trial

__all__ = [
    "Board",
    "Budget",
    "Contender",
    "Plan",
    "ProbeModel",
    "Row",
    "Summary",
    "contender",
    "judge",
    "markdown",
    "summarised",
    "train",
    "trial",
]
