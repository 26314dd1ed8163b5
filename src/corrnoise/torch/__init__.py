"""Private training in PyTorch: Opacus's engine with correlated noise, samplers and checkpoints."""

from corrnoise import _extras

try:
    from corrnoise.torch.adam import Adam, AdamW
    from corrnoise.torch.engine import PrivacyEngine
    from corrnoise.torch.workload import workload_of
except ModuleNotFoundError as missing:
    raise _extras.explained(missing) from None

__all__ = ["Adam", "AdamW", "PrivacyEngine", "workload_of"]
