import subprocess
import sys

import corrnoise as cn


def test_public_names():
    assert set(cn.__all__) == {
        "Calibration",
        "Participation",
        "Plan",
        "Sensitivity",
        "Workload",
        "account",
        "accounting",
        "amplified_band_inv_mf",
        "bounds",
        "calibrate",
        "epsilon_of",
        "lower_bound",
        "mechanisms",
        "noise",
        "plan",
        "planning",
        "sampling",
        "workloads",
    }
    assert set(cn.mechanisms.__all__) == {
        "NAMES",
        "DenseMechanism",
        "Mechanism",
        "Optimization",
        "band_inv_mf",
        "band_mf",
        "bisr",
        "blt",
        "bsr",
        "build",
        "dense",
        "dp_sgd",
        "square_root",
    }


def test_import_brings_numpy_alone():
    """What makes an import slow stays out until it is used."""
    code = "import corrnoise, sys; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "'numpy'" in loaded
    for heavy in (
        "scipy",
        "torch",
        "triton",
        "matplotlib",
        "opacus",
        "jax",
        "dp_accounting",
        "cryptography",
    ):
        assert f"'{heavy}'" not in loaded
