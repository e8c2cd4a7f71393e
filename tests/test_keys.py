"""Random keys of one kind, whatever JAX makes by default."""

import jax
import numpy as np

from fedjax_mr.keys import key_from_data, random_key


def test_a_seed_means_the_same_key_whatever_kind_of_key_is_jax_s_default():
    usual = random_key(7)
    data = np.asarray(jax.random.key_data(usual))
    with jax.default_prng_impl("rbg"):
        assert jax.random.key(7).dtype != usual.dtype
        for key in (random_key(7), key_from_data(data)):
            assert key.dtype == usual.dtype and np.array_equal(jax.random.key_data(key), data)
