"""The benchmark of single products: which ones a network has."""

import pytest

import products
from fedjax_mr.errors import UserError
from fedjax_mr.models import MODELS, build
from fedjax_mr.models.__main__ import multiply_adds


@pytest.mark.parametrize("name", ["cnn_mcmahan", "lenet5", "resnet20", "mlp"])
def test_a_networks_layers_make_all_its_products(name):
    """The operations of the layers found are those counted from the traced network, of a whole batch."""
    entry = MODELS[name]
    found, count = products.layers_of(name)
    model = build(name, input_shape=entry.input_shape, num_classes=entry.num_classes)
    assert sum(layer.operations for layer in found) == 2 * products.BATCH * multiply_adds(model)
    assert count > 0


def test_networks_of_tokens_are_refused():
    with pytest.raises(UserError, match="lstm1"):
        products.layers_of("lstm1")
