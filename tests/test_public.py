"""Every public name is pinned: a change here is a change for users."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import corrnoise as cn

PUBLIC = {
    "corrnoise": """
        Calibration Mechanism Participation Plan Sensitivity Workload __version__ account accounting
        bounds calibrate lower_bound mechanisms noise plan planning records samplings workloads
    """,
    "corrnoise.workloads": "Workload prefix_sum r r_tilde sgd sgd_inverse_sqrt sgd_sqrt toeplitz",
    "corrnoise.mechanisms": """
        Candidate DenseMechanism Family Mechanism Optimization Question ToeplitzMechanism
        amplified_band_inv_mf amplified_bifr amplified_lambda_cgd band_inv_mf band_mf bifr bisr blt
        bsr build dense dp_sgd families get lambda_cgd names register shown square_root
    """,
    "corrnoise.bounds": """
        LowerBounds bisr_upper_bound lower_bound lower_bounds nuclear_norm two_band_bound
        two_band_rmse
    """,
    "corrnoise.accounting": "Draws Estimate gaussian",
    "corrnoise.samplings": """
        ASSUMED BALLS_IN_BINS BEST CYCLIC_POISSON DRAWN FIXED POISSON RANDOM_ALLOCATION Batches
        Calibration Sampling account calibrate get names objections random_words register require
    """,
    "corrnoise.noise": "CorrelatedNoise Key NoiseStream Scheme truncation",
    "corrnoise.planning": "Alternative Plan participation plan",
    "corrnoise.records": "Ledger Record Run Statement read_entries",
    "corrnoise.torch": "Adam AdamW PrivacyEngine workload_of",
    "corrnoise.transformers": "Trainer",
    "corrnoise.jax": """
        NoiseState PrivateRun clipped_sums correlated_noise from_jax_privacy secret_words
        to_jax_privacy
    """,
    "corrnoise.report": "html read write",
    "corrnoise.evidence": "Answer Finding Verdict checklist checklist_text runs verify",
    "corrnoise.auditing": "Audit Canaries Counts epsilon_lower_bound judge",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_every_other_module_of_the_top_level_is_private_or_listed():
    """A module is public by its entry above; the rest is not for users, or is pinned here."""
    tops = {name for _, name, _ in pkgutil.iter_modules(cn.__path__)}
    public = {name.removeprefix("corrnoise.") for name in PUBLIC} - {"corrnoise"}
    inside = {name for name in tops if not name.startswith("_")} - public
    assert inside == {"algebra", "apps", "papers", "participation", "sensitivity"}


def test_the_version_is_the_installed_one():
    from importlib import metadata

    assert cn.__version__ == metadata.version("corrnoise")


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
        "markupsafe",
        "portalocker",
    ):
        assert f"'{heavy}'" not in loaded
