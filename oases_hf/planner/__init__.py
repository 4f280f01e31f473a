"""The planner: which degree, and whether to recompute, for every block (paper section IV).

Read ``terms`` for the cost model, ``solver`` for how the best plan is found.
"""

from .explanation import explain
from .prediction import BlockPrediction, Memory, Prediction, predict, predict_uniform
from .problem import Choice, Problem, message_choices
from .solver import Solution, plan_of, solve, uniform_plan

__all__ = [
    "BlockPrediction",
    "Choice",
    "Memory",
    "Prediction",
    "Problem",
    "Solution",
    "explain",
    "message_choices",
    "plan_of",
    "predict",
    "predict_uniform",
    "solve",
    "uniform_plan",
]
