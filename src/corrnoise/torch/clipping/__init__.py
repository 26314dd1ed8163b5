"""Clipping of every example's gradient in one backward pass."""
