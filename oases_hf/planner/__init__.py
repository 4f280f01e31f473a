"""The planner: which degree, and whether to recompute, for every block (paper section IV).

Read ``terms`` for the cost model, ``solve`` for how the best plan is found.
"""

from .explain import explain
from .predict import BlockPrediction, Memory, Prediction, predict
from .problem import Choice, Problem
from .solve import Solution, solve

__all__ = ["BlockPrediction", "Choice", "Memory", "Prediction", "Problem", "Solution", "explain", "predict", "solve"]
