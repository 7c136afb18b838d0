"""Language models trained, resumed, judged and compared."""

from innerloop.training.checkpoint import Checkpoint, find, load_model
from innerloop.training.evaluation import Score, evaluate, windows_score
from innerloop.training.learner import Learner, Update
from innerloop.training.options import TrainingOptions
from innerloop.training.plan import Plan
from innerloop.training.run import Run
from innerloop.training.session import Watch

__all__ = [
    "Checkpoint",
    "Learner",
    "Plan",
    "Run",
    "Score",
    "TrainingOptions",
    "Update",
    "Watch",
    "evaluate",
    "find",
    "load_model",
    "windows_score",
]
