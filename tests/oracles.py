"""Slow, obvious references: brute force, dense matrices and high precision."""

import itertools
import math

import mpmath
import numpy as np

from corrnoise.noise.generator import chacha


def matrix(coef):
    """The lower-triangular Toeplitz matrix with this first column, entry by entry."""
    n = len(coef)
    return np.array([[coef[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def patterns(n, b, k):
    """Every non-empty set of at most k steps of range(n), any two at least b apart."""

    def grow(first, room):
        yield ()
        if room:
            for i in range(first, n):
                for rest in grow(i + b, room - 1):
                    yield (i, *rest)

    return [p for p in grow(0, k) if p]


def sensitivity(strategy, b, k):
    """max over patterns of sqrt(Σ |⟨C_i, C_j⟩|): the sensitivity where none of them is negative."""
    gram = np.abs(strategy.T @ strategy)
    return math.sqrt(max(gram[np.ix_(p, p)].sum() for p in patterns(len(gram), b, k)))


def signed_sensitivity(strategy, b, k):
    """max over patterns and signs of ‖Σ ± C_i‖: attained, so never above the sensitivity."""
    best = 0.0
    for chosen in patterns(len(strategy), b, k):
        columns = strategy[:, list(chosen)]
        for signs in itertools.product([1.0, -1.0], repeat=len(chosen) - 1):
            best = max(best, np.linalg.norm(columns @ np.array([1.0, *signs])))
    return best


def rmse(workload_coef, noising_coef, b, k):
    """The paper's E from dense matrices and brute force."""
    A, C_inv = matrix(workload_coef), matrix(noising_coef)
    B = A @ C_inv
    n = len(workload_coef)
    return sensitivity(np.linalg.inv(C_inv), b, k) * np.linalg.norm(B) / np.sqrt(n)


def gaussian_delta(epsilon, mu, digits=400):
    """δ(ε) of the Gaussian mechanism with this μ in high precision (Balle and Wang, 2018)."""
    with mpmath.workdps(digits):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)

        def phi(x):
            return mpmath.erfc(-x / mpmath.sqrt(2)) / 2

        return phi(m / 2 - e / m) - mpmath.exp(e) * phi(-m / 2 - e / m)


def series_power(coef, power, n, digits=60):
    """First n coefficients of coef(x)**power in high precision (J. C. P. Miller's recurrence)."""
    with mpmath.workdps(digits):
        a = [mpmath.mpf(float(x)) for x in coef[:n]] + [mpmath.mpf(0)] * max(0, n - len(coef))
        s = mpmath.mpf(power)
        out = [a[0] ** s]
        for m in range(1, n):
            total = mpmath.fsum((s * j - m + j) * a[j] * out[m - j] for j in range(1, m + 1))
            out.append(total / (m * a[0]))
        return np.array([float(x) for x in out])


def series_product(left, right, n, digits=60):
    """First n coefficients of left(x)·right(x) in high precision."""
    with mpmath.workdps(digits):
        a, b = ([mpmath.mpf(float(x)) for x in v] for v in (left, right))
        return np.array(
            [
                float(
                    mpmath.fsum(
                        a[i] * b[m - i] for i in range(max(0, m - len(b) + 1), min(m + 1, len(a)))
                    )
                )
                for m in range(n)
            ]
        )


def power(A, exponent):
    """A^exponent of a lower-triangular Toeplitz matrix: a binomial series that ends after n terms.

    A = a_0(I + N) with N strictly lower-triangular, so N^n = 0. Entries of mpmath keep its digits.
    """
    n = len(A)
    identity = np.eye(n, dtype=int)
    N = A / A[0, 0] - identity
    total, term = 0 * N, identity + 0 * N
    for j in range(n):
        total = total + term
        term = term @ N * (exponent - j) / (j + 1)
    return A[0, 0] ** exponent * total


def real_normal(key, *, stream, step, index, levels=4):
    """A normal of ``noise.generator.reals`` by its definition, to some 70 digits."""
    u = theta = mpmath.mpf(0)
    with mpmath.workdps(90):
        for level in range(levels):
            block = index // 8
            tail = [[block % 2**32], [block >> 32], [step], [stream]]
            words = chacha.blocks(key.subkey(f"exact noise {level}"), tail)[:, 0].tolist()
            numbers = [
                low + (high << 32) for low, high in zip(words[0::2], words[1::2], strict=True)
            ]
            place = mpmath.mpf(2) ** (-64 * (level + 1))
            u += numbers[index % 4] * place
            theta += numbers[4 + index % 4] * place
        radius = mpmath.sqrt(-2 * mpmath.log(u))
        angle = 2 * mpmath.pi * theta
        return radius * (mpmath.cos(angle) if index % 8 < 4 else mpmath.sin(angle))


def exact_release(key, weights, *, stream, step, index, value, scale, grid):
    """The multiple of the grid nearest to value + scale·Σ w·z, as an integer."""
    with mpmath.workdps(90):
        noise = mpmath.mpf(0)
        for back, weight in enumerate(reversed(list(weights))):
            z = real_normal(key, stream=stream, step=step - back, index=index)
            noise += mpmath.mpf(float(weight)) * z
        return int(mpmath.nint((mpmath.mpf(value) + mpmath.mpf(scale) * noise) / mpmath.mpf(grid)))


def matrix_unit_sum(products, at_once, extra_bits):
    """A sum as matrix units make it, which is a little too small, towards 0.

    Some products at a time, and the sum so far, are cut to the bits of the largest of them as
    float32 has them, and to some more; then added exactly, and the sum is cut to float32. Products
    have up to 24 bits. By Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores" (2025).
    """
    total = 0.0
    for start in range(0, len(products), at_once):
        terms = np.append(products[start : start + at_once], total)
        largest = np.frexp(np.abs(terms).max())[1] - 1
        step = 2.0 ** (largest - 23 - extra_bits)
        found = np.trunc(terms / step).sum() * step  # whole numbers, exact in float64
        step = 2.0 ** (np.frexp(abs(found))[1] - 24)
        total = float(np.trunc(found / step) * step)
    return total
