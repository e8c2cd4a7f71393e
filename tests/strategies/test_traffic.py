"""What is sent in a round, counted in numbers of 4 bytes: S of a model's state, P of its parameters."""

import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.strategies.interface import LayerExchange

K, N, C, S = 3, 6, 3, 10  # S: the public samples
GENERATOR = 512 * (100 + C) + 512 + 16 * 512 + 16 + 4 * 512  # two dense layers and BatchNorm, to 16 features
AS_FEDAVG = lambda s, p: (K * s, K * s)
TABLE = {
    "fedavg": AS_FEDAVG,
    "fedprox": AS_FEDAVG,
    "scaffold": lambda s, p: (K * (s + p), K * (s + p)),
    "moon": AS_FEDAVG,
    "feddyn": AS_FEDAVG,
    "feddc": lambda s, p: (K * (s + p), K * (s + p)),
    "fedntd": AS_FEDAVG,
    "fedlc": AS_FEDAVG,
    "fedgen": lambda s, p: (K * (s + GENERATOR), K * s + N * C),  # the label counts in the first round alone
    "clusamp": AS_FEDAVG,
    "fedasam": AS_FEDAVG,
    "fedsam": AS_FEDAVG,
    "mofedsam": lambda s, p: (K * (s + p), K * s),
    "fedgamma": lambda s, p: (K * (s + p), K * (s + p)),
    "fedspeed": AS_FEDAVG,
    "fedsmoo": lambda s, p: (K * (s + p), K * (s + p)),
    "fedswa": AS_FEDAVG,
    "fedmoswa": lambda s, p: (K * (s + p), K * (s + p)),
    "fedexp": AS_FEDAVG,
    "fedsubavg": AS_FEDAVG,
    "ties": AS_FEDAVG,
    "taskarithmetic": AS_FEDAVG,
    "diloco": AS_FEDAVG,
    "fedala": AS_FEDAVG,
    "fedrod": AS_FEDAVG,
    "fedbuff": AS_FEDAVG,
    "gitfl": AS_FEDAVG,
    "fedsa": lambda s, p: (K * (s + 1), K * s),
    "fedmut": AS_FEDAVG,
    "fedmr": AS_FEDAVG,
    "indep": AS_FEDAVG,
    "ditto": AS_FEDAVG,
    "pfedbayes": lambda s, p: (K * (s + p), K * (s + p)),
    "perfedavg": AS_FEDAVG,
    "fedmd": lambda s, p: (K * (S * C + 2 * S), K * S * C),  # and the numbers of two rounds' samples
    "fccl": lambda s, p: (K * S * C, K * S * C),
    "fedkemf": AS_FEDAVG,  # its own network is the knowledge network here
}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.slow if row is AS_FEDAVG and name != "fedavg" else ())
        for name, row in TABLE.items()
    ],
)
def test_bytes_are_those_of_the_papers(engine, sent, strategy):
    engine = engine(strategy, "normed")
    shapes = engine.constants.problem.model.shapes()
    sizes = [trees.num_bytes(tree) // 4 for tree in (shapes, shapes["params"])]
    down, up = (4 * count for count in TABLE[strategy](*sizes))
    assert sent(engine) == (down, up, 0)


def test_clients_keep_what_the_papers_say(engine):
    shapes = engine("fedavg", "normed").constants.problem.model.shapes()
    state, params = (trees.num_bytes(tree) for tree in (shapes, shapes["params"]))
    expected = {
        "scaffold": N * params,
        "moon": N * (state + 1),  # and whether there is a previous model
        "feddyn": N * params,
        "feddc": N * 2 * params,
        "fedgamma": N * params,
        "fedspeed": N * params,
        "fedsmoo": N * 2 * params,
        "fedmoswa": N * params,
        "diloco": N * (params + 1),  # the velocity, and whether there is one
    }
    assert {name: trees.num_bytes(engine(name, "normed").shapes().memory) for name in expected} == expected
    others = [engine(name, "normed") for name in TABLE if name not in expected]
    assert all(each.shapes().memory is None for each in others if each.strategy.personal_model is None)


def test_every_exchange_sends_and_receives_the_selected_share_of_the_models():
    """60 bytes of models, of which half is sent and half received, twice, before the training and before the upload."""
    models = {"w": np.zeros((3, 5), np.float32)}
    exchange = lambda when: LayerExchange(lambda models, key: (models, {}), when, 0.5, 2)
    assert [int(exchange(when).parcels(models).size) for when in ("both", "before_upload")] == [240, 120]
    assert (exchange("both").before_training, exchange("both").before_upload) == (True, True)
    assert (exchange("before_upload").before_training, exchange("before_training").before_upload) == (False, False)
