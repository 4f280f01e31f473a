"""The ways in: the Accelerate plugin and the Trainer callback."""
