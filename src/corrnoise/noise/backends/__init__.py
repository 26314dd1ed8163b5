"""Where noise is added: NumPy arrays and torch tensors in main memory, and CUDA tensors."""
