"""Pictures of the partitions: which client holds how many samples of which class, of the embedded digits."""

import drawings

from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.federation import federated_data

CLIENTS = 20

PALETTE = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip


def picture(*flags: str) -> str:
    """The picture of a partition: a bar per client, a colour per class.

    Args:
      flags: the flags of the partition.
    """
    federated = federated_data(configuration.parse([*flags, f"--clients={CLIENTS}", "--seed=0"]))
    counts = federated.label_counts()
    scale, parts = 150 / counts.sum(axis=1).max(), []
    for client, row in enumerate(counts):
        x, top = 20 + client * 29, 160.0
        for label, count in enumerate(row):
            tall = float(count) * scale
            top -= tall
            if count:
                parts.append(
                    f'<rect x="{x}" y="{top:.1f}" width="22" height="{tall:.1f}" style="fill:{PALETTE[label]}">'
                    f"<title>client {client}: {count} of class {label}</title></rect>"
                )
        parts.append(f'<text x="{x + 11}" y="170" class="small" text-anchor="middle">{row.sum()}</text>')
    return drawings.svg(180, f"Samples of {CLIENTS} clients by class: {' '.join(flags)}", *parts)
