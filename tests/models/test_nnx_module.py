"""NNX modules: equal to their Linen twins, pure, without random state in the variables, and refused in one line."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_mr import models
from fedjax_mr.errors import UserError
from fedjax_mr.models import Zoo, user_module
from fedjax_mr.models.parts import partly
from fedjax_mr.models.slices import slices
from fedjax_mr.testing.federations import numbers_like, tree_close, tree_equal

IMAGES = {"input_shape": (6, 6, 1), "num_classes": 3, "input_dtype": np.float32}
FACTS = {"input_shape": (4,), "num_classes": 3, "input_dtype": np.float32}
X = np.random.default_rng(7).standard_normal((5, 6, 6, 1)).astype(np.float32)
KEY = jax.random.key(3)
init, apply = jax.jit(models.Model.init), jax.jit(models.Model.apply)


class Twin(nn.Module):
    """Convolution, BatchNorm and two dense layers in Linen."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(nn.Conv(2, (3, 3), name="conv")(x))
        return nn.Dense(3, name="a_last")(nn.relu(nn.Dense(4, name="dense")(nn.relu(x).reshape(len(x), -1))))


class Net(nnx.Module):
    """`Twin` in NNX."""

    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(1, 2, (3, 3), rngs=rngs), nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
        self.dense, self.a_last = nnx.Linear(72, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).reshape(len(x), -1)
        return self.a_last(nnx.relu(self.dense(x)))


class Noisy(nnx.Module):
    """Two dropout layers with streams of the tag `default`."""

    def __init__(self, rngs, classes: int = 3):
        self.dropout, self.again = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, classes, rngs=rngs)

    def features(self, x):
        return self.again(self.dropout(x))

    def head(self, z):
        return self.last(z)

    def __call__(self, x):
        return self.head(self.features(x))


class Tied(nnx.Module):
    """A list, one of whose layers is used twice and first read by another name; names in another order than calls."""

    def __init__(self, rngs):
        self.steps = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.before, self.end = self.steps[10], nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.before(x)
        for step in self.steps:
            x = x + step(x)
        return self.end(x)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(7, 4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, decode=False, rngs=rngs)
        self.norm, self.last = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x, mask=None):
        assert mask is None or mask.shape == x.shape[:1]
        x = self.embedding(x)
        return self.last(self.norm(x + self.attention(x)).mean(axis=1))


def parts(variables):
    return variables["params"], {name: tree for name, tree in variables.items() if name != "params"}


def train(model, variables, x, key=KEY, mask=None):
    return model.train_apply(*parts(variables), x, mask=mask, key=key)


trained = jax.jit(train)


def test_it_computes_what_its_linen_twin_does():
    """Evaluation, training, gradients, and new statistics, into which padding never enters."""
    twin, model = user_module.bind(Twin(), **IMAGES), user_module.bind(Net, **IMAGES)
    variables = jax.device_put(numbers_like(twin.shapes()))
    assert jax.tree.map(jnp.shape, model.shapes()) == jax.tree.map(jnp.shape, variables)
    padded = np.concatenate([X, np.full((3, 6, 6, 1), 100, np.float32)])

    def results(model):
        def loss(params, x, mask):
            out, state = train(model, variables | {"params": params}, x, mask=mask)
            return jnp.square(out[: len(X)]).sum(), (out[: len(X)], state)

        both = jax.grad(loss, has_aux=True)
        mask = np.float32(np.arange(8) < 5)
        return model.apply(variables, X), both(variables["params"], X, None), both(variables["params"], padded, mask)

    ours, theirs = jax.jit(lambda: (results(model), results(twin)))()
    tree_close(ours, theirs, rtol=1e-4, atol=1e-5)
    tree_close(ours[1], ours[2], rtol=1e-4, atol=1e-5)
    assert not np.allclose(ours[0], ours[1][1][0])  # the modes differ


def test_dropout_follows_the_key_alone():
    """No random state is kept, each layer has its own mask, and streams of any tag are renewed."""
    x = np.ones((8, 4), np.float32)
    features = jax.jit(functools.partial(models.Model.train_apply, method="features", mask=None))
    for module in (Noisy, Noisy(nnx.Rngs(5)), Noisy(nnx.Rngs(params=1, dropout=2))):
        model = user_module.bind(module, **FACTS)
        variables = init(model, KEY)
        assert jax.tree.leaves(variables) == jax.tree.leaves(variables["params"])
        one, two = (trained(model, variables, x, jax.random.key(key))[0] for key in (0, 1))
        np.testing.assert_array_equal(one, trained(model, variables, x, jax.random.key(0))[0])
        assert not np.array_equal(one, two)
        np.testing.assert_array_equal(*np.asarray(apply(model, variables, x))[:2])
        z, _ = features(model, *parts(variables), x, key=KEY)
        kept = set(np.unique(np.asarray(z)).tolist())
        assert kept == {0.0, 4.0}  # one mask for both layers would keep half of the values


@pytest.mark.slow
def test_vmap_over_models_is_a_loop():
    model = user_module.bind(Net, **IMAGES)
    keys = jax.random.split(KEY, 3)
    stacked = jax.vmap(model.init)(keys)
    together = jax.jit(jax.vmap(lambda variables, key: train(model, variables, X, key)))(stacked, keys)
    for number in range(3):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
        tree_close(one, model.init(keys[number]), rtol=1e-6)
        alone = train(model, one, X, keys[number])
        tree_close(jax.tree.map(lambda leaf, number=number: leaf[number], together), alone, rtol=1e-5, atol=1e-6)


def test_an_instance_is_a_start_and_a_function_is_initialised_from_the_key():
    instance = Noisy(nnx.Rngs(1))
    model, drawn = user_module.bind(instance, **FACTS), user_module.bind(Noisy, **FACTS)
    for key in (0, 1):
        found = init(model, jax.random.key(key))["params"]["last"]["kernel"]
        np.testing.assert_array_equal(found, instance.last.kernel)
    one, two = (init(drawn, jax.random.key(key))["params"]["last"]["kernel"] for key in (0, 1))
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(one, Noisy(nnx.Rngs(0)).last.kernel)
    assert instance.dropout.deterministic is False  # it was not changed
    again = models.of_module(model, **FACTS)
    tree_equal(init(again, KEY), init(model, KEY))


def test_a_part_of_an_instance_may_be_frozen():
    """Frozen statistics stay, and their BatchNorm runs in evaluation mode in training, too."""
    instance = Net(nnx.Rngs(1))
    model = partly(user_module.bind(instance, **IMAGES), ["dense/*", "a_last/*"], key=KEY)
    variables = init(model, KEY)
    assert list(variables) == ["params"] and sorted(variables["params"]) == ["a_last", "dense"]
    out, state = trained(model, variables, X)
    assert state == {}
    instance.eval()
    np.testing.assert_allclose(out, nnx.jit(instance)(X), rtol=1e-5, atol=1e-6)


class Told(Net):
    """`Net` whose BatchNorm is told its mode."""

    def __call__(self, x, train: bool = False):
        x = nnx.relu(self.norm(self.conv(x), not train)).reshape(len(x), -1)
        return self.a_last(nnx.relu(self.dense(x)))


def test_frozen_statistics_stay_if_the_module_passes_the_mode():
    model = partly(user_module.bind(Told, **IMAGES), "a_last/*", key=KEY)
    out, state = trained(model, variables := init(model, KEY), X)
    assert state == {}
    np.testing.assert_allclose(out, apply(model, variables, X), rtol=1e-5, atol=1e-6)


def test_layers_are_in_forward_order_and_tied_ones_are_one():
    model = user_module.bind(Tied, **FACTS)
    # NNX stores a shared variable at its first path in alphabetical order.
    assert [layer.name for layer in model.layers()] == ["before", *(f"steps/{i}" for i in range(10)), "end"]
    assert len(jax.tree.leaves(model.shapes())) == 24 and len({i for each in model.layers() for i in each.leaves}) == 24
    assert user_module.bind(Noisy, **FACTS).head_name() == "last"
    names = [layer.name for layer in user_module.bind(Net, **IMAGES).layers()]
    assert names == ["conv", "norm", "dense", "a_last"]


def test_attention_beside_the_mask_of_padding():
    model = user_module.bind(Attention, input_shape=(5,), num_classes=3, input_dtype=np.int32)
    x, mask = jax.ShapeDtypeStruct((2, 5), np.int32), jax.ShapeDtypeStruct((2,), np.float32)
    run = lambda variables, x, mask: (train(model, variables, x, mask=mask)[0], model.apply(variables, x))
    assert [each.shape for each in jax.eval_shape(run, model.shapes(), x, mask)] == [(2, 3), (2, 3)]
    assert [layer.name for layer in model.layers()][1:5] == [
        f"attention/{name}" for name in ("query", "key", "value", "out")
    ]


def test_the_module_comes_back():
    model = user_module.bind(Net, **IMAGES)
    _, state = trained(model, variables := numbers_like(model.shapes()), X)
    module = model.module.module(variables | state)
    assert type(module) is Net and type(module.norm) is nnx.BatchNorm
    both = jax.jit(lambda variables: (model.module.module(variables)(X), model.apply(variables, X)))
    np.testing.assert_allclose(*both(variables | state), rtol=1e-6)


def test_the_hash_sees_classes_fields_values_and_shapes():
    name = lambda module, **facts: user_module.recorded_name(user_module.bind(module, **FACTS | facts))
    sequence = lambda *layers: lambda rngs: nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), *layers)
    assert name(Noisy) == name(lambda rngs: Noisy(rngs)) and name(Noisy).startswith("given:Noisy:")
    assert name(Noisy(nnx.Rngs(1))) == name(Noisy(nnx.Rngs(1)))
    others = [Noisy, Noisy(nnx.Rngs(1)), Noisy(nnx.Rngs(2)), Tied, sequence(nnx.relu), sequence(nnx.tanh)]
    assert len({name(module) for module in others}) == 6
    bind = lambda module: user_module.bind(module, **FACTS)
    assert bind(Noisy) == bind(Noisy) != bind(Tied) and hash(bind(Noisy)) == hash(bind(Noisy))
    assert bind(Noisy(nnx.Rngs(1))) == bind(Noisy(nnx.Rngs(2))) != bind(Noisy)  # values are arguments of programs


class Parts(nnx.Module):
    """A representation and a head that are submodules, a switch of its own name, and random numbers as an argument."""

    def __init__(self, rngs):
        self.features, self.head = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x, training, rngs=None):
        noise = jax.random.normal(rngs.dropout(), (len(x), 5)) if training else 0.0
        return self.head(self.features(x) + noise)


def test_submodules_switches_and_random_numbers_of_a_call():
    model = user_module.bind(Parts, **FACTS)
    variables, x = numbers_like(model.shapes()), np.ones((2, 4), np.float32)
    z = jax.jit(model.features)(variables, x)
    assert model.head_name() == "head" and z.shape == (2, 5)
    np.testing.assert_allclose(jax.jit(model.head)(variables, z), apply(model, variables, x), rtol=1e-6)
    one, two = (trained(model, variables, x, jax.random.key(key))[0] for key in (0, 1))
    assert not np.allclose(one, two)


def test_narrow_networks_are_refused():
    with pytest.raises(UserError, match="Noisy cannot be narrowed, because it is an NNX module"):
        slices(user_module.bind(Noisy, **FACTS), ())


class WithCache(Noisy):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = nnx.Cache(jnp.zeros(3))


class WithArray(Noisy):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.table = jnp.zeros(3)


class Chance(Noisy):
    def eval(self, **attributes):
        pass


class Fixed(nnx.Module):
    def __init__(self, rngs, *, average=True, classes=3):
        self.norm, self.last = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, classes, rngs=rngs)
        self.average = average

    def __call__(self, x):
        return self.last(self.norm(x, use_running_average=self.average))


class Low(nnx.Module):
    def __init__(self, rngs):
        self.last = nnx.Linear(4, 3, param_dtype=jnp.bfloat16, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.last(x)


class Empty(nnx.Module):
    def __call__(self, x):
        return x[:, :3]


class NoCall(nnx.Module):
    def __init__(self, rngs):
        self.last = nnx.Linear(4, 3, rngs=rngs)


REFUSED = {
    "a class without rngs": (Empty, "or flax.nnx.Module, not the class Empty; write Empty(...)"),
    "more arguments": (lambda width, rngs: None, "cannot be built (TypeError: "),
    "no module": (lambda rngs: 3, "a function of rngs must return an instance of flax.nnx.Module, not int"),
    "another state": (WithCache, "WithCache has seen of the kind Cache, but only nnx.Param (trained) and"),
    "an array": (WithArray, "WithArray has table, an array that is no variable"),
    "an array of an instance": (WithArray(nnx.Rngs(0)), "WithArray has table, an array that is no variable"),
    "chance": (Chance, "Chance draws random numbers in evaluation"),
    "no parameters": (Empty(), "Empty has no parameters to train"),
    "no call": (NoCall, "NoCall has no method '__call__'"),
    "bfloat16": (Low, "Low has variables of bfloat16 (['params']['last']['bias'])"),
    "too few classes": (lambda rngs: Noisy(rngs, 2), "Noisy returns 2 of float32 for a sample, but the data need 3"),
    "fixed statistics": (Fixed, "does not update its batch_stats['norm']['mean'] in training: leave its use_running"),
    "moving statistics": (lambda rngs: Fixed(rngs, average=False), "updates its batch_stats['norm']['mean'] in eval"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_one_line(case):
    module, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        user_module.bind(module, **FACTS)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rows_of_models(monkeypatch):
    """A function of the number of classes and ``rngs``, a class, or an instance."""
    monkeypatch.setitem(models.MODELS, "drawn", models.ModelRow(lambda num_classes, rngs: Noisy(rngs, num_classes)))
    monkeypatch.setitem(models.MODELS, "kind", models.ModelRow(Noisy))
    monkeypatch.setitem(models.MODELS, "started", models.ModelRow(Noisy(nnx.Rngs(0))))
    monkeypatch.setitem(models.MODELS, "lacking", models.ModelRow(lambda width, rngs: Noisy(rngs, width)))
    built = {name: models.build(name, **FACTS) for name in ("drawn", "kind", "started")}
    assert {each.num_parameters() for each in built.values()} == {15}
    assert built == {name: models.build(name, **FACTS) for name in built}
    with pytest.raises(UserError, match=r"'lacking'\] is called without width"):
        models.build("lacking", **FACTS)
    zoo = Zoo.of([*built.values()])
    assert jax.eval_shape(lambda: zoo.apply(zoo.init(KEY, 1), np.ones((2, 4), np.float32))).shape == (2, 3)
