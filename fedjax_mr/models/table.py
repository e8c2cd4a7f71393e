"""A dense network for rows of a table, in which some columns hold categories.

Source: Guo and Berkhahn, "Entity embeddings of categorical variables" (2016): each category has a vector that is
trained, and the vectors stand beside the numbers. The widths are ours.
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.errors import UserError
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import DenseBlock, head

WIDEST = 16  # largest width of the vector of a category
EXACT = 256  # largest code that bfloat16 represents exactly, with all smaller ones


def width_of(categories: int) -> int:
    """The width of the vectors of a column: half the number of its categories, rounded up, at most 16."""
    return min(WIDEST, (categories + 1) // 2)


class Category(nn.Module):
    """The vectors of a column's categories, with the parameter ``embedding`` [categories, width].

    Attributes:
      categories: k, the number of categories.
    """

    categories: int

    @nn.compact
    def __call__(self, codes: jax.Array) -> jax.Array:
        """Look up the vectors [B, width] of codes 0..k-1 [B]. Those of other codes, such as -1 (unknown), are zero."""
        shape = (self.categories, width_of(self.categories))
        table = self.param("embedding", nn.initializers.normal(1.0), shape, jnp.float32)
        return jax.nn.one_hot(codes.astype(jnp.int32), self.categories, dtype=table.dtype) @ table


class Columns(nn.Module):
    """Join the numbers of a row and the vectors of its categories.

    Attributes:
      categories: see `MLPTable`.
    """

    categories: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the vectors [B, numbers + widths] of rows [B, F].

        Raises:
          UserError: there are categories for another number of columns, or codes would be rounded.
        """
        if not any(self.categories):
            return x
        if len(self.categories) != x.shape[-1]:
            raise UserError(
                f"categories has {len(self.categories)} entries, but a row has {x.shape[-1]} columns: give one entry "
                "per column, 0 for numbers"
            )
        if x.dtype == jnp.bfloat16 and max(self.categories) > EXACT + 1:
            raise UserError(
                f"bfloat16 rounds codes above {EXACT}, but a column has {max(self.categories)} categories: leave out "
                "precision="
            )
        numbers = [column for column, count in enumerate(self.categories) if not count]
        vectors = [
            Category(count, name=f"column{column}")(x[:, column])
            for column, count in enumerate(self.categories)
            if count
        ]
        return jnp.concatenate([x[:, np.array(numbers, int)], *vectors], axis=-1)


class MLPTable(BlockNet):
    """Two hidden layers over a row of a table [F], in which some columns are categories.

    A categorical column holds codes 0..k-1 as floating-point numbers. -1 is an unknown or missing category: its vector
    is zero and is not trained.

    Attributes:
      categories: number of categories k of each column, 0 for a column of numbers. (): all columns are numbers.
      hidden: width of the hidden layers.
    """

    takes: ClassVar[str] = "rows"
    categories: tuple[int, ...] = ()
    hidden: int = 64

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        return (
            ("columns", Columns(self.categories)),
            ("hidden1", DenseBlock(self.hidden, initialisation=self.initialisation)),
            ("hidden2", DenseBlock(self.hidden, initialisation=self.initialisation)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )
