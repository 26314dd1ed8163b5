import os
import sys
from pathlib import Path

# The tests run one worker per core; threads on top would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

# Deterministic: a failure is a failure for everyone.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")
