"""Runs schedules on real layers."""
