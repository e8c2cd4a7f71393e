"""Trees as named arrays: the same bits come back, and what is wrong is said with whose it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr.deploy import wire
from fedjax_mr.errors import UserError

TREE = {"params": {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}, "count": jnp.int32(4), "empty": ()}


def test_there_and_back():
    record = wire.pack(TREE)
    assert set(record) == {"params/dense/kernel", "params/dense/bias", "count"}
    jax.tree.map(np.testing.assert_array_equal, wire.unpack(record, TREE, who="mine"), TREE)
    shapes = jax.eval_shape(lambda: TREE)
    assert jax.tree.structure(wire.unpack(record, shapes, who="mine")) == jax.tree.structure(TREE)
    assert wire.pack(()) == {} and wire.unpack({}, (), who="mine") == ()
    np.testing.assert_array_equal(wire.unpack(wire.pack(jnp.arange(3)), jnp.arange(3), who="mine"), np.arange(3))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"count": None}, "client 3's upload lacks 'count': 2 arrays, expected 3"),
        ({"more": np.zeros(1)}, "client 3's upload has an unknown 'more'"),
        ({"count": 4}, "client 3's upload: 'count' is not an array"),
        ({"count": np.asarray(4, np.float32)}, "client 3's upload: 'count' is float32[], expected int32[]"),
        ({"params/dense/bias": np.zeros(4, np.float32)}, "'params/dense/bias' is float32[4], expected float32[3]"),
        ({"params/dense/bias": np.full(3, np.nan, np.float32)}, "'params/dense/bias' has numbers that are not finite"),
    ],
)
def test_what_is_refused(change, line):
    record = {name: value for name, value in (wire.pack(TREE) | change).items() if value is not None}
    with pytest.raises(UserError) as error:
        wire.unpack(record, TREE, who="client 3's upload")
    assert str(error.value).startswith("client 3's upload") and line in str(error.value)


def test_numbers_that_are_not_finite_can_be_let_through():
    assert np.isnan(wire.unpack({"tree": np.asarray(np.nan, np.float32)}, jnp.float32(0), who="mine", finite=False))
    with pytest.raises(UserError, match="mine is not a record"):
        wire.unpack(None, TREE, who="mine")


def test_text_of_the_other_side_becomes_one_printable_line():
    assert wire.one_line("a\x1b[31m\nb\tc\u202e\ud800 ") == "a?[31m b c??"
    assert len(wire.one_line("x" * 10**7)) == 200


def test_the_room_for_a_message():
    assert wire.size_limit(TREE) == 2**20 + 3 * 2**13 + 4 * (6 + 3 + 1)
