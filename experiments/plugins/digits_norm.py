"""A network of one's own for `experiments/personal.sh`: ``cnn_digits`` with BatchNorm, which FedBN needs.

python -m fedjax_mr.main --import=experiments/plugins/digits_norm.py --model=cnn_digits_norm --strategy=fedbn
"""

import flax.linen as nn
import jax

import fedjax_mr as fmr


class CNNDigitsNorm(nn.Module):
    """The widths of ``cnn_digits``, with BatchNorm after both convolutions.

    Attributes:
      num_classes: C.
    """

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """The logits [B, C] of images [B, 8, 8, 1]."""
        for width in (16, 32):
            x = nn.Conv(width, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(nn.max_pool(x, (2, 2), (2, 2)))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_classes)(x)


fmr.MODELS["cnn_digits_norm"] = fmr.ModelRow(CNNDigitsNorm, (8, 8, 1), 10, "ours, for FedBN")
