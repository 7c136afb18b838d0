"""Tasks by which a memory is judged: seeded sequences, exact labels, a stated chance level."""

from innerloop.data.tasks.catalogue import TASKS, task
from innerloop.data.tasks.copying import SelectiveCopying
from innerloop.data.tasks.counting import ModularArithmetic, Parity
from innerloop.data.tasks.recall import AssociativeRecall, MultiQueryRecall, Needle, OverwriteRecall
from innerloop.data.tasks.regression import Capacity, DriftingRegression
from innerloop.data.tasks.task import IGNORED, Batch, Task
from innerloop.data.tasks.words import GENERATORS, WordProblem, generated

__all__ = [
    "GENERATORS",
    "IGNORED",
    "TASKS",
    "AssociativeRecall",
    "Batch",
    "Capacity",
    "DriftingRegression",
    "ModularArithmetic",
    "MultiQueryRecall",
    "Needle",
    "OverwriteRecall",
    "Parity",
    "SelectiveCopying",
    "Task",
    "WordProblem",
    "generated",
    "task",
]
