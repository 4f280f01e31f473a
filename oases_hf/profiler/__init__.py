"""Measures what the planner plans with: a layer of the real model, and the links between the real ranks."""

from .profile import Workload, profile

__all__ = ["Workload", "profile"]
