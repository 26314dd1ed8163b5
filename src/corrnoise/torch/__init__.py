"""Private training in PyTorch: Opacus's engine with correlated noise, samplers and checkpoints."""

from corrnoise.torch.adam import Adam, AdamW
from corrnoise.torch.engine import PrivacyEngine
from corrnoise.torch.workload import workload_of

__all__ = ["Adam", "AdamW", "PrivacyEngine", "workload_of"]
