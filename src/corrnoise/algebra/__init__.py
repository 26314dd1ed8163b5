"""Toeplitz algebra on coefficient vectors, rational series, and the recursions that run them."""
