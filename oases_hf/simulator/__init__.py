"""A step in time before it is run: the schedule that the runtime executes, on a compute and a communication lane."""

from .lanes import Span
from .replay import Simulation, simulate

__all__ = ["Simulation", "Span", "simulate"]
