"""Rates of a network's convolutions and matrix products in XLA and in PyTorch, on one core of this machine.

    python experiments/lab/benchmark.py products --models=cnn_mcmahan,lenet5

For each convolution and dense layer of a network at batch 50: the rate of the forward pass and of its two gradients
(with respect to the input and to the kernel), for our layers compiled by XLA inside a loop and for PyTorch. Both use
one thread and take turns; medians are printed. Two more rows are a large product, and the update of all parameters by
SGD with momentum, which moves five times the parameters. The table shows which parts of a network are slow on a
machine. A multiply-add counts as two operations.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import models
from fedjax_mr.engine.program import compiler_options
from fedjax_mr.errors import UserError
from fedjax_mr.models import layers, windows

BATCH, LARGE, REPEATS, LOOPS = 50, 1024, 7, 10
PASSES = ("forward", "input", "kernel")

Timed = Callable[[], Any]


class Layer(NamedTuple):
    """A convolution [h, w, I, O] of images [B, H, W, I], or a dense layer [I, O] of vectors [B, I]."""

    name: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: int = 1
    padding: Any = "SAME"

    @property
    def operations(self) -> int:
        """Number of operations of one pass."""
        return 2 * math.prod(self.y) * math.prod(self.kernel[:-1])


def layers_of(name: str) -> tuple[list[Layer], int]:
    """The convolutions and dense layers of a network in forward order, and its number of parameters.

    Raises:
      UserError: it has neither, or is for token sequences.
    """
    entry = models.MODELS[name]
    if entry.input_dtype != np.float32:
        raise UserError(f"{name} reads tokens: products are compared for networks of images")
    network = models.build(name, input_shape=entry.input_shape, num_classes=entry.num_classes)
    found: list[Layer] = []

    def note(call: Callable, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, result = context.module, call(*args, **kwargs)
        path = "/".join(module.path)
        if isinstance(module, layers.Dense):
            x = args[0].shape
            found.append(Layer(path, x, result.shape, (x[-1], module.features)))
        elif isinstance(module, layers.Conv):
            x = args[0].shape
            height, width = windows.pair(module.kernel_size)
            kernel = (height, width, x[-1], module.features)
            strides, _ = windows.pair(module.strides)
            y = jax.eval_shape(
                lambda x, kernel: windows.conv(x, kernel, strides=strides, padding=module.padding),
                jax.ShapeDtypeStruct(x, np.float32),
                jax.ShapeDtypeStruct(kernel, np.float32),
            )
            found.append(Layer(path, x, y.shape, kernel, strides, module.padding))
        return result

    shapes = network.shapes()
    with nn.intercept_methods(note):
        jax.eval_shape(network.apply, shapes, jax.ShapeDtypeStruct((BATCH, *entry.input_shape), np.float32))
    return found, sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["params"]))


# ---- XLA


def looped(function: Callable, *args: np.ndarray) -> Timed:
    """``LOOPS`` calls in one compiled loop. The arguments change, so XLA cannot hoist work out of the loop."""

    def body(_: jax.Array, args: list[jax.Array]) -> list[jax.Array]:
        results = jax.lax.optimization_barrier(jax.tree.leaves(function(*args)))
        little = sum(leaf[(0,) * leaf.ndim] for leaf in results) * 1e-6
        return [array.at[(0,) * array.ndim].add(little) for array in args]

    return _compiled(lambda args: jax.lax.fori_loop(0, LOOPS, body, args), list(map(jnp.asarray, args)))


def _compiled(function: Callable, argument: Any) -> Timed:
    """A call of the function, compiled with the compiler options of rounds."""
    program = jax.jit(function, compiler_options=compiler_options())
    program(argument)
    return lambda: jax.block_until_ready(program(argument))


def our_passes(layer: Layer) -> dict[str, Timed]:
    """The forward pass of a layer and its two gradients."""
    x, kernel, gradient = random(layer.x, layer.kernel, layer.y)

    def forward(x: Any, kernel: Any) -> jax.Array:
        if len(layer.kernel) == 2:
            return jnp.matmul(x, kernel)
        return windows.conv(x, kernel, strides=layer.strides, padding=layer.padding)

    return {
        "forward": looped(forward, x, kernel),
        "input": looped(
            lambda gradient, kernel: jax.vjp(lambda x: forward(x, kernel), x)[1](gradient), gradient, kernel
        ),
        "kernel": looped(
            lambda gradient, x: jax.vjp(lambda kernel: forward(x, kernel), kernel)[1](gradient), gradient, x
        ),
    }


def our_update(count: int) -> Timed:
    """The update of ``count`` parameters by SGD with momentum."""
    params, trace, gradient = random((count,), (count,), (count,))

    def body(_: jax.Array, state: Any) -> Any:
        params, trace, gradient = state
        trace = 0.5 * trace + gradient
        return params - 0.01 * trace, trace, gradient

    state = jax.tree.map(jnp.asarray, (params, trace, gradient))
    return _compiled(lambda state: jax.lax.fori_loop(0, LOOPS, body, state), state)


# ---- PyTorch


def their_passes(layer: Layer) -> dict[str, Timed]:
    """The forward pass of a layer and its two gradients in PyTorch."""
    import torch
    from torch.nn import grad

    x, kernel, gradient = map(torch.from_numpy, random(layer.x, layer.kernel, layer.y))
    if len(layer.kernel) == 2:
        passes = {
            "forward": lambda: x @ kernel,
            "input": lambda: gradient @ kernel.T,
            "kernel": lambda: x.T @ gradient,
        }
    else:
        # An even filling: PyTorch has no other, and ours differs from it only where strides leave out an edge.
        padding = [(wide - 1) // 2 if new * layer.strides >= old else 0
                   for old, new, wide in zip(layer.x[1:3], layer.y[1:3], layer.kernel, strict=False)]  # fmt: skip
        x, gradient = (array.permute(0, 3, 1, 2).contiguous() for array in (x, gradient))
        kernel = kernel.permute(3, 2, 0, 1).contiguous()
        fixed: dict[str, Any] = {"stride": layer.strides, "padding": padding}
        passes = {
            "forward": lambda: torch.nn.functional.conv2d(x, kernel, **fixed),
            "input": lambda: grad.conv2d_input(x.shape, kernel, gradient, **fixed),
            "kernel": lambda: grad.conv2d_weight(x, kernel.shape, gradient, **fixed),
        }
    return {name: repeated(function) for name, function in passes.items()}


def their_update(count: int) -> Timed:
    """The update of ``count`` parameters by PyTorch's SGD with momentum."""
    import torch

    values, gradient = map(torch.from_numpy, random((count,), (count,)))
    params = torch.nn.Parameter(values)
    params.grad = gradient
    return repeated(torch.optim.SGD([params], lr=0.01, momentum=0.5).step)


def repeated(call: Callable) -> Timed:
    """``LOOPS`` calls of a function."""

    def run() -> None:
        for _ in range(LOOPS):
            call()

    return run


# ---- Both in turn


def random(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of these shapes with normal entries."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def seconds(*contestants: Timed) -> list[float]:
    """Median seconds of a call of each contestant. The contestants take turns with ``LOOPS`` calls."""
    times: list[list[float]] = [[] for _ in contestants]
    for turn in range(REPEATS + 1):  # the first one warms up
        for seconds, contestant in zip(times, contestants, strict=True):
            started = time.perf_counter()
            contestant()
            if turn:
                seconds.append((time.perf_counter() - started) / LOOPS)
    return [statistics.median(seconds) for seconds in times]


def compare_products(name: str) -> list[dict[str, Any]]:
    """A row for each pass of each layer of a network, one for a large product and one for the update.

    This process stays on one core from here on: JAX has not begun yet.

    Raises:
      UserError: PyTorch is missing, or the network is not of images.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError("products are compared with PyTorch's: pip install -e '.[parity]'") from None

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def compare(layer: str, work: str, operations: int | None, own: Timed, other: Timed) -> None:
        own_seconds, other_seconds = seconds(own, other)
        rate = lambda each: operations / each / 1e9 if operations else None
        rows.append(
            {
                "model": name,
                "layer": layer,
                "pass": work,
                "xla_gflops": rate(own_seconds),
                "torch_gflops": rate(other_seconds),
                "xla_ms": 1e3 * own_seconds,
                "torch_ms": 1e3 * other_seconds,
                "ratio": other_seconds / own_seconds,
            }
        )

    found, count = layers_of(name)
    for number, layer in enumerate(found):
        own, other = our_passes(layer), their_passes(layer)
        for work in ("forward", "kernel") if number == 0 else PASSES:  # nobody asks for the images' gradient
            compare(layer.name, work, layer.operations, own[work], other[work])
    compare("parameters", "update", None, our_update(count), their_update(count))
    total = {key: sum(row[key] for row in rows) for key in ("xla_ms", "torch_ms")}
    everything = {"layer": "all of these", "pass": "step", **total, "ratio": total["torch_ms"] / total["xla_ms"]}
    rows.append(dict.fromkeys(rows[0]) | {"model": name} | everything)
    square = Layer("product", (LARGE, LARGE), (LARGE, LARGE), (LARGE, LARGE))
    compare(
        f"{LARGE} x {LARGE}",
        "product",
        square.operations,
        our_passes(square)["forward"],
        their_passes(square)["forward"],
    )
    print(f"PyTorch's instruction set: {torch.backends.cpu.get_cpu_capability()}")
    return rows
