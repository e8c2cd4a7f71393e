"""Flax modules of users: their calls, their errors, and their hash."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_mr import models, tasks
from fedjax_mr.errors import UserError
from fedjax_mr.models import user_module
from fedjax_mr.models.cnn import Logistic
from fedjax_mr.testing.federations import numbers_like

FACTS = {"input_shape": (4,), "num_classes": 3, "input_dtype": np.float32}


class Net(nn.Module):
    """A typical module: list fields, BatchNorm, dropout, a switch with a default."""

    widths: Sequence[int] = (5,)
    activation: Callable = nn.relu

    @nn.compact
    def __call__(self, x, train: bool = True):
        for width in self.widths:
            x = self.activation(nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(width)(x)))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic):
        return nn.Dense(3)(nn.Dropout(0.5)(x, deterministic=deterministic))


class ByField(nn.Module):
    training: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not self.training)(x))


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Keywords(nn.Module):
    """`Net` with its switch in ``**kwargs``."""

    @nn.compact
    def __call__(self, x, **options):
        return Net(name="net")(x, options.get("train", False))


class Handing(nn.Module):
    """Passes all keywords on to a module that accepts one of them."""

    @nn.compact
    def __call__(self, x, **options):
        return nn.Dense(3)(Net(name="net")(x, **options))


class OfNNX(nnx.Module):
    """Modules in a list, which NNX numbers by integers, and dropout, which needs its stream at initialisation."""

    def __init__(self, rngs):
        self.first = nnx.List([nnx.Linear(4, 5, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x, use_running_average=None):
        x = self.norm(self.first[0](x), use_running_average=use_running_average)
        return self.last(self.dropout(x, deterministic=use_running_average))


class Parts(nn.Module):
    """A module with a representation and a head, whose layer has an arbitrary name."""

    def setup(self):
        self.body, self.last = nn.Dense(5), nn.Dense(3)

    def features(self, x):
        return nn.relu(self.body(x))

    def head(self, z):
        return self.last(z)

    def __call__(self, x):
        return self.head(self.features(x))


ORDINARY = [
    *(Net([6, 5]), Deterministic(), ByField(), Plain(), Parts(), Logistic(3)),
    *(Keywords(), Handing(), nn.Sequential([nn.Dense(5), nn.relu, nn.Dense(3)]), nnx.bridge.ToLinen(OfNNX)),
]


def test_ordinary_modules_fit():
    for module in ORDINARY:
        model = user_module.bind(module, **FACTS)
        assert (model.name, hash(model)) == (type(module).__name__, hash(user_module.bind(module, **FACTS)))


@pytest.mark.slow
@pytest.mark.parametrize("module", ORDINARY, ids=lambda module: type(module).__name__)
def test_ordinary_modules_train_and_are_tested(module):
    """Dropout is active, and BatchNorm's statistics are updated, in training only."""
    model = user_module.bind(module, **FACTS)
    variables = model.init(jax.random.key(0))
    params, state = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}
    x = jax.random.normal(jax.random.key(3), (8, 4))
    train = lambda number: model.train_apply(params, state, x, mask=jnp.ones(8), key=jax.random.key(number))
    trained, new = train(1)
    assert model.apply(variables, x).shape == trained.shape == (8, 3)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    if isinstance(module, Net | Deterministic | ByField | Keywords | Handing | nnx.bridge.ToLinen):
        assert float(jnp.abs(trained - train(2)[0]).max()) > 0  # other masks of dropout
        alike = np.asarray(model.apply(variables, jnp.ones((8, 4))))
        assert np.ptp(alike, axis=0).max() == 0  # equal samples, and no dropout in testing


@pytest.mark.slow
class Ends(nn.Module):
    """A softmax in the middle, and another function at the end."""

    last: Callable

    @nn.compact
    def __call__(self, x):
        return self.last(nn.Dense(3)(nn.softmax(nn.Dense(4)(x))))


class EndsNNX(nnx.Module):
    def __init__(self, *, rngs):
        self.dense = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return nnx.softmax(self.dense(x))


def by_hand(x):
    powers = jnp.exp(x / 2)
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential([nn.Dense(3), nn.softmax]), Ends(nn.softmax), Ends(jax.jit(nn.softmax)), Ends(by_hand), EndsNNX,
        Ends(jax.checkpoint(lambda x: nn.softmax(x[:, None])[:, 0].astype(jnp.float32))),
    ],
)  # fmt: skip
def test_a_module_that_returns_probabilities_is_warned_about(module):
    with pytest.warns(UserWarning, match="returns probabilities, but the loss .*: return the logits") as seen:
        user_module.bind(module, **FACTS)
    assert len(seen) == 1 and "\n" not in str(seen[0].message)


@pytest.mark.parametrize(
    "last", [lambda x: x, nn.log_softmax, jnp.exp, nn.sigmoid, lambda x: x / jnp.sum(x), lambda x: x / jnp.exp(x).sum()]
)
def test_a_softmax_elsewhere_is_no_reason_to_warn(last):
    user_module.bind(Ends(last), **FACTS)  # a warning would be an error


def test_any_keywords_are_offered_the_switch():
    """A module with ``**kwargs`` trains like the same module with a switch, and is tested without dropout."""
    twin, x, mask = user_module.bind(Net(), **FACTS), np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4), jnp.ones(4)
    inner, apply = numbers_like(twin.shapes()), jax.jit(models.Model.apply)
    for module in (Keywords(), Handing()):
        model = user_module.bind(module, **FACTS)
        variables = numbers_like(model.shapes())
        statistics = {"batch_stats": variables["batch_stats"]}
        train = jax.jit(functools.partial(model.train_apply, mask=mask, key=jax.random.key(1)))
        once, moved = train(variables["params"], statistics, x)
        assert not np.array_equal(*(tree["batch_stats"]["net"]["BatchNorm_0"]["mean"] for tree in (variables, moved)))
        assert not np.allclose(once, apply(model, variables, x))  # dropout is at work in training
    nested = {name: {"net": tree} for name, tree in inner.items()}
    assert np.array_equal(apply(twin, inner, x), apply(user_module.bind(Keywords(), **FACTS), nested, x))


@pytest.mark.slow
def test_padding_never_enters_the_statistics_of_flax_s_batch_norm():
    model = user_module.bind(Net(), **FACTS)
    variables = model.init(jax.random.key(0))
    rows = jax.random.normal(jax.random.key(1), (3, 4))
    padded = jnp.concatenate([rows, jnp.full((5, 4), 100.0)])
    mask = jnp.arange(8) < 3
    statistics = {"batch_stats": variables["batch_stats"]}
    train = lambda x, mask: model.train_apply(variables["params"], statistics, x, mask=mask, key=jax.random.key(2))[1]
    full, masked = train(rows, jnp.ones(3)), train(padded, mask.astype(jnp.float32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), full, masked)


class Softmaxes(Plain):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x), x


class Unswitched(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


class Misspelt(nnx.Module):
    def __init__(self, rngs):
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.lost(x)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = [nnx.Linear(4, 3, rngs=rngs)]

    def __call__(self, x):
        return self.layers[0](x)


class NeverMoving(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


class AlwaysMoving(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.last = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(x))


class WithTable(nn.Module):
    @nn.compact
    def __call__(self, x):
        table = self.variable("tables", "scale", jnp.ones, (), jnp.int8)
        return nn.Dense(3)(x * table.value.astype(jnp.float32))


class NoParameters(nn.Module):
    def __call__(self, x):
        return x[:, :3]


class WithArray(Plain):
    table: jax.Array | None = None


REFUSED = {
    "a class": (Net, "must be an instance of flax.linen.Module or flax.nnx.Module, not the class Net; write Net(...)"),
    "no module": ("mlp", "not str"),
    "too few classes": (nn.Dense(2), "Dense returns 2 of float32 for a sample, but the data need 3 logits"),
    "a tuple": (Softmaxes(), "returns a tuple for a sample, but the data need 3 logits"),
    "another input": (nn.Conv(3, (3, 3, 3)), "Conv cannot be initialised for samples 4 of float32 (ValueError"),
    "no switch": (Unswitched(), "does it need a switch between training and evaluation"),
    "a plain list in NNX": (
        Listed,
        "(ValueError: self.layers is a list with modules or variables, which NNX does not see in it; write self.layers "
        "= nnx.List([...])); see test_user_module.py, line ",
    ),
    "a misspelt name": (Misspelt, f"see test_user_module.py, line {inspect.getsourcelines(Misspelt.__call__)[1] + 1}"),
    "statistics that never move": (
        NeverMoving(),
        "does not update its batch_stats['BatchNorm_0']['mean'] in training",
    ),
    "statistics that always move": (
        nnx.bridge.ToLinen(AlwaysMoving),
        "updates its batch_stats['norm']['mean'] in eval",
    ),
    "bfloat16": (
        nn.Dense(3, dtype=jnp.float32, param_dtype=jnp.bfloat16),
        "must be float32; for computation in bfloat16 set Flax's dtype",
    ),
    "int8": (
        WithTable(),
        "variables of int8 (['tables']['scale']), but all variables are averaged over clients and must",
    ),
    "no parameters": (NoParameters(), "has no parameters to train"),
    "an array": (WithArray(jnp.ones(2)), "has a field that cannot be hashed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_one_line(case):
    module, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        user_module.bind(module, **FACTS)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert ("does it need a switch" in str(error.value)) == (case == "no switch")


def test_the_hash_sees_class_fields_and_shapes():
    name = lambda module, **facts: user_module.recorded_name(user_module.bind(module, **FACTS | facts))
    assert name(Net([6, 5])) == name(Net((6, 5))) != name(Net([5, 6]))
    assert name(Net()).startswith("given:Net:") and len(name(Net()).split(":")[2]) == 8
    others = [Net(), Net(activation=nn.tanh), Plain(), nn.Dense(3), nn.Dense(3, use_bias=False)]
    assert len({name(module) for module in others} | {name(Net(), input_shape=(5,))}) == 6


def test_features_and_head_are_asked_for_by_name():
    model = user_module.bind(Parts(), **FACTS)
    assert model.head_name() == "last"
    x = jax.ShapeDtypeStruct((2, 4), np.float32)
    assert jax.eval_shape(model.features, model.shapes(), x).shape == (2, 5)
    plain = user_module.bind(Plain(), **FACTS)
    with pytest.raises(UserError, match=r"Plain has no method 'features'.*features\(x\).*head\(z\)"):
        jax.eval_shape(plain.features, plain.shapes(), x)


def test_the_task_decides_what_a_module_returns():
    facts = {"input_shape": (4, 4, 1), "input_dtype": np.float32, "task": tasks.Segmentation(width=3)}
    model = user_module.bind(nn.Conv(3, (3, 3)), **facts)
    assert model.task == facts["task"] and model.output_shape() == (4, 4, 3)
    with pytest.raises(UserError) as error:
        user_module.bind(nn.Conv(2, (3, 3)), **facts)
    assert str(error.value) == ("Conv returns 4x4x2 of float32 for a sample, but segmentation needs 4x4x3 of float32")
    again = models.of_module(model, **facts | {"task": tasks.Segmentation(width=3, metrics=())})
    assert again.task == model.task
    assert user_module.bind(nn.Dense(3), **FACTS).task == tasks.Classification(width=3)


def test_a_softmax_is_right_where_the_task_needs_no_logits():
    softmax = nn.Sequential([nn.Dense(3), nn.softmax])
    with pytest.warns(UserWarning, match="returns probabilities"):
        user_module.bind(softmax, **FACTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        user_module.bind(softmax, **FACTS | {"task": tasks.Regression(width=3)})


def test_a_row_of_ones_own(monkeypatch):
    """One field is enough, and options of built-in networks do not apply."""
    monkeypatch.setitem(models.MODELS, "mine", models.ModelRow(Parts))
    monkeypatch.setitem(models.MODELS, "sized", models.ModelRow(lambda num_classes: nn.Dense(num_classes)))
    monkeypatch.setitem(models.MODELS, "lacking", models.ModelRow(nn.Dense))
    monkeypatch.setitem(models.MODELS, "bare", Parts)
    assert [models.build(name, **FACTS).num_parameters() for name in ("mine", "sized")] == [43, 15]
    for name, options, message in (
        ("lacking", {}, "is called without features"),
        ("bare", {}, "is not a ModelRow: write MODELS['bare'] = ModelRow(MyNetwork)"),
        ("mine", {"projection": 4}, "projection=4 only applies to built-in networks"),
        ("given:mine:12345678", {}, "has no registered name"),
    ):
        with pytest.raises(UserError) as error:
            models.build(name, **FACTS, **options)
        assert message in str(error.value)
