"""The command ``python -m fedjax_mr.models``: print the table of all networks."""

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from fedjax_mr.config import imports
from fedjax_mr.models import MODELS, Model, as_in_source
from fedjax_mr.models.base import describe
from fedjax_mr.models.platforms import skip_absent_accelerators
from fedjax_mr.terminal import interrupts
from fedjax_mr.terminal.commands import exit_code

CONVOLUTIONS = frozenset({"_conv", "convolve"})  # functions of `windows` and `minimal_filtering`
COLUMNS = ("model", "sample", "classes", "layers", "leaves", "parameters", "state bytes", "multiply-adds", "source")


def row(name: str) -> tuple[str, ...]:
    """One row of the table: a network, for samples as in its source."""
    entry, model = MODELS[name], as_in_source(name)
    leaves = jax.tree.leaves(model.shapes())
    numbers = (
        entry.num_classes,
        len(model.layers()),
        len(leaves),
        model.num_parameters(),
        sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        multiply_adds(model),
    )
    sample = describe(entry.input_shape, entry.input_dtype).replace(" of float32", "")
    return name, sample, *(f"{number:,}" for number in numbers), entry.source


def multiply_adds(model: Model) -> int:
    """Number of multiply-adds of the forward pass of one sample, in convolutions and matrix products."""
    sample = jax.ShapeDtypeStruct((1, *model.input_shape), model.input_dtype)
    return _multiply_adds(jax.make_jaxpr(model.apply)(model.shapes(), sample).jaxpr)


def _multiply_adds(jaxpr: core.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        operands: list[Any] = [variable.aval for variable in equation.invars]
        outputs: list[Any] = [variable.aval for variable in equation.outvars]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += outputs[0].size * math.prod(operands[0].shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated" or _is_our_convolution(equation):
            # Kernels are [h, w, I, O]: each output value takes h w I products.
            total += outputs[0].size * math.prod(operands[1].shape[:-1])
        else:
            total += equation.params.get("length", 1) * sum(map(_multiply_adds, _inner(equation.params)))
    return total


def _is_our_convolution(equation: core.JaxprEqn) -> bool:
    """Whether the equation is a call of `windows.conv`, whose inner program depends on the platform."""
    names = (inner.debug_info.func_name for inner in _inner(equation.params))
    return equation.primitive.name == "custom_vjp_call" and not CONVOLUTIONS.isdisjoint(names)


def _inner(params: dict) -> Iterator[core.Jaxpr]:
    for value in params.values():
        jaxpr = getattr(value, "jaxpr", value)  # before JAX 0.10 a closed jaxpr contains the jaxpr
        if isinstance(jaxpr, core.Jaxpr):
            yield jaxpr


def network_table() -> str:
    """The table of all networks as text."""
    rows = [COLUMNS, *(row(name) for name, entry in MODELS.items() if entry.input_shape)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(COLUMNS))]
    left = {0, 1, len(COLUMNS) - 1}

    def line(cells: tuple[str, ...]) -> str:
        aligned = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join(map(line, rows))


def main() -> int:
    """Print the table. The exit code is 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m fedjax_mr.models", description="Print the table of all networks.")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], help="Python file that registers networks"
    )

    def work() -> None:
        imports.load(parser.parse_args().imports)
        skip_absent_accelerators()  # the form of a convolution depends on the platform
        print(network_table())
        print("Multiply-adds: forward pass of one sample.", end=" ")
        print("State bytes: parameters and normalisation statistics in float32.")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
