"""Backends that add noise: to NumPy arrays and torch tensors in main memory, and on CUDA."""
