"""Privacy accounting as functions of numbers and vectors; the samplings compute ε and δ with it."""

from corrnoise.accounting import gaussian
from corrnoise.accounting.balls_in_bins import Estimate
from corrnoise.accounting.draws import Draws

__all__ = ["Draws", "Estimate", "gaussian"]
