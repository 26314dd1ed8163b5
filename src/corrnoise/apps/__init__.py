"""Applications on top of the library: the command line, a training loop, datasets and models.

Nothing in the library imports them. They show what the library is for, and are what
``corrnoise train`` and the reproductions of papers run on.
"""
