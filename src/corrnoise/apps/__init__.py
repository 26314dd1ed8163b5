"""Applications on top of the library: the command line, a training loop, datasets and models.

The library imports none of them. They show how to use it; ``corrnoise train`` and the reproductions
of papers are built on them.
"""
