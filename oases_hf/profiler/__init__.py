"""Measures what the planner plans with: a layer of the real model, and the links between the real ranks."""

from .estimate import Estimate
from .layer import Autocast, Running
from .profile import Architecture, Workload, profile

__all__ = ["Architecture", "Autocast", "Estimate", "Running", "Workload", "profile"]
