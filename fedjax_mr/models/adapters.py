"""LoRA: a trained product of two thin matrices beside frozen weights (Hu et al., ICLR 2022).

A targeted dense layer computes y + (alpha / r) (x A) B, with A [in, r] random and B [r, out] zero, so a network with
adapters starts as its base. Only A and B train. Under ``vmap`` the frozen layers of all clients are one product over
their K x B rows, because x W is never merged with the adapter of a client.

This is our own code, and not the package qwix, because here an adapter is two more leaves of ``params`` beside the
kernel: frozen parts, layers, units of recombination and messages then need no other rule. The whole fits on a page.

(A G, G^-1 B) is the same adapter as (A, B) for every invertible G, so the columns of A mean nothing without their B.
Therefore a pair is one unit of recombination (`Layer.units`), and models are compared by their products
(`Lora.gram`). The mean of several models has the mean of their products (`Lora.mean`), which no pair of rank r has.
It is stored as a dense change of each targeted matrix in the collection `CHANGE`. Unlike a stack of rank K r, it does
not grow with the number of models, and methods that change the base need the same form.

Two options of the package peft, both off by default: dropout of the inputs of the adapters in training, and rsLoRA
(Kalajdzievski, arXiv 2312.03732, 2023), which scales by alpha / sqrt(r).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import layers, parts
from fedjax_mr.models.base import PAIR, Model, Variables

A, B = PAIR
SCALE = "lora_scale"  # alpha / r, or alpha / sqrt(r): a frozen number
CHANGE = "change"  # collection of the changes [in, out] of targeted kernels
DENSE = (nn.Dense, nn.DenseGeneral, layers.Dense)
ATTENTION = ("*query/kernel", "*value/kernel")
Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Lora:
    """The hooks of an adapted network in `Model`.

    Attributes:
      dropout: probability that an input of an adapter is zero in training. The frozen layer receives all inputs.
      exponent: adapters of rank r are scaled by alpha / r^exponent. rsLoRA: 0.5.
    """

    dropout: float = 0.0
    exponent: float = 1.0

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Add the adapter of a dense layer, and the change of its kernel, to its output."""
        y, module = call(*args, **kwargs), context.module
        if context.method_name != "__call__" or not isinstance(module, DENSE):
            return y
        x = functools.partial(_rows, module, args[0] if args else kwargs["inputs"])
        if module.has_variable("params", A):
            a, b, scale = (module.get_variable("params", name) for name in (A, B, SCALE))
            rows = x(a)
            if self.dropout and module.has_rng("dropout"):  # only training passes this stream
                rows = layers.dropped(rows, self.dropout, module.make_rng("dropout"))
            y = y + (scale * layers.product(layers.product(rows, a), b)).reshape(y.shape)
        if module.has_variable(CHANGE, "kernel"):
            change = module.get_variable(CHANGE, "kernel")
            # The change is no parameter, so it is float32 also where the layer computes in bfloat16.
            y = y + (x(change).astype(y.dtype) @ change.astype(y.dtype)).reshape(y.shape)
        return y

    def mean(self, model: Model, models: Variables, weights: jax.Array | None = None) -> Variables:
        """The mean of K models [K, ...], exactly: fresh adapters and the mean of the products as `CHANGE`."""
        mean = trees.mean(models, weights=weights)
        if not any(True for _ in pairs(models)):  # A or B is common: the mean of the other one is exact
            return mean
        return with_change(without_products(mean), mean_changes(model, models, weights=weights))

    def merged(self, model: Model, variables: Variables) -> Variables:
        """The variables of the base with the adapters added to its kernels, for plain Flax."""
        return merged(model, variables)

    def gram(self, model: Model, models: Variables) -> jax.Array:
        """Inner products [K, K] of K models [K, ...], in which the product of each pair stands for the pair.

        <A_i B_i, A_j B_j> is the sum of the entrywise products of A_i^T A_j and B_i B_j^T, so no product is formed.
        """
        total, others = [], parts.flat(models["params"])
        inner = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        for path, a, b in pairs(models):
            both = inner("kir,jis->kjrs", a, a) * inner("kro,jso->kjrs", b, b)
            total.append(jnp.square(scale_of(model, path)) * jnp.sum(both, axis=(2, 3)))
            del others[*path, A], others[*path, B]
        return functools.reduce(jnp.add, [*total, trees.gram(others)] if others else total)


def lora(
    model: Model,
    rank: int = 8,
    alpha: float = 16.0,
    *,
    key: jax.Array,
    targets: str = "",
    head: bool = True,
    trainable: parts.Trainable = "",
    variables: Any = None,
    dropout: float = 0.0,
    stabilized: bool = False,
) -> Model:
    """A network with adapters. Its base is frozen.

    Args:
      model: a network of a Linen module without frozen variables.
      rank: r.
      alpha: the products are scaled by alpha / r.
      key: initialises A, and the base if ``variables`` is None; consumed.
      targets: patterns of the paths of the kernels, separated by commas. Default: the queries and values of attention,
        or all dense kernels but the head's if there is no attention.
      head: whether the last layer trains, too. A head with the weights of the embedding stays frozen.
      trainable: what trains, if it is not the adapters (and the head), such as ``*/lora_b`` for FFA-LoRA.
      variables: the variables of the base, such as pretrained ones.
      dropout: probability that an input of an adapter is zero in training.
      stabilized: whether the products are scaled by alpha / sqrt(r), as in rsLoRA.

    Raises:
      UserError: no dense kernel matches ``targets``, or as `parts.partly`.
    """
    if model.frozen or len(model.networks) > 1:
        raise UserError(f"{model.name} cannot get adapters: they need one network that has no frozen variables yet")
    if not isinstance(model.module, nn.Module):
        raise UserError(f"{model.name} cannot get adapters: they need a module of flax.linen; use the LoRA of flax.nnx")
    shapes = model.module_shapes()
    kernels = dense_kernels(model)
    chosen = _chosen(model, kernels, targets)
    given = None if variables is None else parts.checked(variables, shapes, model.name)
    base = jax.device_get(parts.initialised(model, key)) if given is None else given
    hooks = Lora(dropout, 0.5 if stabilized else 1.0)
    scale = alpha / rank**hooks.exponent
    added = {path: _pair(jax.random.fold_in(key, n), kernels[path], rank, scale) for n, path in enumerate(chosen)}
    own = {"params": unflatten_dict({(*path, name): leaf for path in chosen for name, leaf in added[path].items()})}
    last = "/".join((*list(kernels)[-1], "*"))
    untied = not getattr(model.module, "tied", False)
    rule = parts.predicate(trainable or f"*{A},*{B}{',' + last if head and untied else ''}")
    trains = lambda path: rule(path) and not path.endswith(SCALE)
    start, frozen = parts.split(parts.joined(base, own), trains)
    if not start.get("params"):
        raise UserError(f"trainable={trainable} matches no parameter of {model.name} with adapters")
    if given is None:  # of what was drawn here, only the adapters are a start: a head starts from the key of its model
        start = parts.split(parts.joined(model.start, own), trains)[0]
    return dataclasses.replace(model, frozen=frozen, start=start, adapter=hooks)


def _pair(key: jax.Array, shape: tuple[int, int], rank: int, scale: float) -> dict[str, np.ndarray]:
    """A is random, B is zero."""
    inputs, outputs = shape
    return {
        A: np.asarray(_random(key, (inputs, rank))),
        B: np.zeros((rank, outputs), np.float32),
        SCALE: np.asarray(scale, np.float32),
    }


def _random(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """An initial A [in, r], uniform in +-1 / sqrt(in), as in the package peft."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _chosen(model: Model, kernels: dict[Path, tuple[int, int]], targets: str) -> list[Path]:
    matching = lambda patterns: [path for path in kernels if parts.predicate(patterns)("/".join((*path, "kernel")))]
    chosen = matching(targets) if targets else matching(ATTENTION) or list(kernels)[:-1]
    if not chosen:
        names = ", ".join("/".join((*path, "kernel")) for path in kernels)
        wanted = f"lora_targets={targets} matches no dense kernel" if targets else "no dense kernel but the head's"
        raise UserError(f"{wanted} of {model.name}; its dense kernels are {names or 'none'}")
    return chosen


def dense_kernels(model: Model) -> dict[Path, tuple[int, int]]:
    """The dense layers of a network in forward order, with the sizes [in, out] of their kernels as matrices."""
    shapes = model.module_shapes()
    found: dict[Path, tuple[int, int]] = {}

    def record(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if isinstance(module, DENSE) and context.method_name == "__call__" and not getattr(module, "batch_dims", ()):
            kernel = module.get_variable("params", "kernel")
            features = module.features if isinstance(module.features, int) else int(np.prod(module.features))
            found.setdefault(tuple(module.path), (kernel.size // features, features))
        return call(*args, **kwargs)

    x = jax.ShapeDtypeStruct((1, *model.input_shape), model.input_dtype)
    with nn.intercept_methods(record):
        jax.eval_shape(model.apply, shapes, x)
    return found


def _rows(module: Any, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """The inputs of a dense layer as rows [R, in]."""
    axes = getattr(module, "axis", -1)
    axes = sorted(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))  # as Flax has them
    return jnp.moveaxis(x, axes, range(-len(axes), 0)).reshape(-1, matrix.shape[0])


# --- algebra ---------------------------------------------------------------------------------------------------------


def pairs(variables: Variables) -> Iterator[tuple[Path, jax.Array, jax.Array]]:
    """Yield (path of the layer, A [..., in, r], B [..., r, out]) of each layer that has both."""
    params = parts.flat(variables["params"])
    for path in params:
        if path[-1] == A and (*path[:-1], B) in params:
            yield path[:-1], params[path], params[(*path[:-1], B)]


def scale_of(model: Model, path: Path) -> jax.Array:
    """The number by which the product of a layer is scaled: alpha / r, or alpha / sqrt(r)."""
    scale: jax.Array = parts.flat(model.frozen["params"])[(*path, SCALE)]
    return scale


def changes(model: Model, variables: Variables) -> Variables:
    """The sum of adapters and earlier changes for each targeted kernel: a tree of leaves ``kernel`` [..., in, out].

    ``variables`` is one model or several [K, ...].
    """
    whole = model.whole(variables)
    earlier = parts.flat(variables.get(CHANGE, {}))
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    total = {(*path, "kernel"): scale_of(model, path) * product(a, b) for path, a, b in pairs(whole)}
    return unflatten_dict({path: leaf + earlier[path] if path in earlier else leaf for path, leaf in total.items()})


def mean_changes(model: Model, models: Variables, *, weights: jax.Array | None = None) -> Variables:
    """The weighted mean of `changes` of K models [K, ...], without a dense matrix for each.

    It is the product of the stacked factors [A_1 .. A_K] and [p_1 B_1; ..; p_K B_K] (FLoRA, Wang et al., NeurIPS 2024).
    """
    earlier = parts.flat(trees.mean(models.get(CHANGE, {}), weights=weights))
    total = {}
    for path, a, b in pairs(models):
        weighted = jnp.ones(a.shape[0]) if weights is None else weights.astype(jnp.float32)
        shares = scale_of(model, path) * weighted / jnp.sum(weighted)
        a = a * shares[:, None, None]
        product = jnp.einsum("kir,kro->io", a, b, precision=jax.lax.Precision.HIGHEST)
        total[*path, "kernel"] = product + earlier[*path, "kernel"] if earlier else product
    return unflatten_dict(total)


def fresh(model: Model, key: jax.Array) -> Variables:
    """New adapters of a network, distributed like its initial ones: A is random, B is zero; consumes ``key``."""
    params = {}
    for number, (path, a, b) in enumerate(pairs(model.shapes())):
        params[*path, A] = _random(jax.random.fold_in(key, number), a.shape)
        params[*path, B] = jnp.zeros(b.shape)
    return {"params": unflatten_dict(params)}


def larger_scale(model: Model, rank: jax.Array) -> jax.Array:
    """Quotient of the scales of rank r_i and of the largest rank r: r / r_i, or sqrt(r / r_i) with rsLoRA."""
    (_, a, _), *_ = pairs(model.shapes())
    return (a.shape[-1] / rank) ** model.adapter.exponent


def scaled_for(model: Model, rank: jax.Array) -> Model:
    """The network of a client of rank r_i, whose products are scaled by alpha / r_i in place of alpha / r."""
    params, factor = parts.flat(model.frozen["params"]), larger_scale(model, rank)
    scaled = {path: leaf * factor if path[-1] == SCALE else leaf for path, leaf in params.items()}
    return dataclasses.replace(model, frozen=model.frozen | {"params": unflatten_dict(scaled)})


def with_scaled_b(variables: Variables, factor: jax.Array) -> Variables:
    """The adapters with each B multiplied by a number."""
    params = parts.flat(variables["params"])
    for path, _, b in pairs(variables):
        params[(*path, B)] = b * factor
    return variables | {"params": unflatten_dict(params)}


def factors(model: Model, change: Variables, *, roots: bool = False) -> Variables:
    """The adapters with products nearest to ``change``: its largest singular values, and their vectors.

    B has the singular values, and the columns of A are orthonormal. With ``roots``, both factors have the square roots
    of the singular values.
    """
    params = {}
    for path, a, _ in pairs(model.shapes()):
        rank = a.shape[-1]
        u, s, vt = jnp.linalg.svd(parts.flat(change)[*path, "kernel"], full_matrices=False)
        u, s, vt = (jnp.pad(each, pad) for each, pad in zip((u, s, vt), _padding(s.shape[0], rank), strict=True))
        a, values = u[:, :rank], s[:rank] / scale_of(model, path)
        if roots:
            values = jnp.sqrt(values)
            a = a * values[None, :]
        params[*path, A] = a
        params[*path, B] = vt[:rank] * values[:, None]
    return {"params": unflatten_dict(params)}


def _padding(count: int, rank: int) -> tuple:
    """Padding of u, s and vt of ``count`` singular values to at least ``rank``."""
    more = (0, max(0, rank - count))
    return ((0, 0), more), (more,), (more, (0, 0))


def no_change(model: Model) -> Variables:
    """Changes of zeros."""
    shapes = jax.eval_shape(lambda: changes(model, model.init(random_key(0))))
    return trees.zeros_like(shapes)


def with_change(variables: Variables, change: Variables) -> Variables:
    """A model on a changed base."""
    return variables | {CHANGE: change}


def without_products(variables: Variables) -> Variables:
    """A model whose B are zero, so that its adapters add nothing."""
    params = parts.flat(variables["params"])
    for path, _, b in pairs(variables):
        params[(*path, B)] = jnp.zeros_like(b)
    return variables | {"params": unflatten_dict(params)}


def merged(model: Model, variables: Variables) -> Variables:
    """The variables of the base with the adapters added to its kernels, for plain Flax."""
    whole = parts.flat({name: tree for name, tree in model.whole(variables).items() if name != CHANGE})
    for path, change in parts.flat(changes(model, variables)).items():
        kernel = whole[("params", *path)]
        whole[("params", *path)] = kernel + change.reshape(kernel.shape)
    return unflatten_dict({path: leaf for path, leaf in whole.items() if path[-1] not in (A, B, SCALE)})
