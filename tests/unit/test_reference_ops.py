"""The reference's operations that no Llama has, against values worked out by hand or published."""

from __future__ import annotations

import numpy as np

from tests import reference


def test_gelu() -> None:
    """x times the normal distribution: Phi(1) = 0.8413447460685429, Phi(2) = 0.9772498680518208."""
    expected = [0.0, 0.8413447460685429, -0.15865525393145707, 1.9544997361036416]
    np.testing.assert_allclose(reference.gelu([0.0, 1.0, -1.0, 2.0]), expected, rtol=1e-14)


def test_gelu_tanh() -> None:
    """A published value (PyTorch, approximate="tanh"); it stays within 5e-4 of the exact form."""
    np.testing.assert_allclose(reference.gelu_tanh([1.0]), [0.8411919906082768], rtol=1e-12)
    x = np.linspace(-6, 6, 101)
    assert 1e-4 < np.abs(reference.gelu_tanh(x) - reference.gelu(x)).max() < 5e-4


def test_layer_norm() -> None:
    """Of (1, 3): mean 2, variance 1. With eps 3 the spread is 2."""
    x = np.array([[1.0, 3.0]])
    np.testing.assert_array_equal(reference.layer_norm(x, [2.0, 5.0], None, 0.0), [[-2.0, 5.0]])
    out = reference.layer_norm(x, [2.0, 5.0], [0.25, -1.0], 3.0)
    np.testing.assert_array_equal(out, [[-0.75, 1.5]])


def test_write_slots() -> None:
    cache = np.zeros((3, 1, 2, 1))
    reference.write_slots(cache, np.array([[[7.0]], [[8.0]], [[9.0]]]), [5, -1, 2])
    np.testing.assert_array_equal(cache.ravel(), [0, 0, 9, 0, 0, 7])
