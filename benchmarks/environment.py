"""The environment of jax-privacy, under build/, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENT = "jax-privacy==2.0.0"
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "jax-privacy"


def interpreter() -> Path:
    """The Python that has jax-privacy; the first call installs it."""
    python = FOLDER / "bin" / "python"
    ready = FOLDER / ".ready"
    if not ready.exists() or ready.read_text() != REQUIREMENT:
        print(f"installing {REQUIREMENT} under {FOLDER.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, REQUIREMENT], check=True)
        ready.write_text(REQUIREMENT)
    return python
