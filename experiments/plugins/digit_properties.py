"""A dataset of one's own with several labels, for `experiments/tasks.sh`: each digit is even or not, above 4, a square.

python -m fedjax_mr.main --import=experiments/plugins/digit_properties.py --dataset=digit_properties --partition=iid
"""

import numpy as np

import fedjax_mr as fmr
from fedjax_mr.data.sources import digits

CLIENTS = 20
NAMES = ("even", "above 4", "square")


def load(request):
    """The digits with three labels, x [M, 8, 8, 1], y [M, 3]. Clients have few digits, by Dirichlet(0.3)."""
    source = digits.load(request)
    labels = lambda y: np.stack([y % 2 == 0, y > 4, np.isin(y, (0, 1, 4, 9))], axis=1).astype(np.int32)
    divided = fmr.data.federate(source, num_clients=CLIENTS, alpha=0.3, seed=0)
    client = np.empty(len(source.y), np.int64)
    for number, rows in enumerate(divided.train.parts()):
        client[rows] = number
    test_client = np.full(len(source.test_y), "", object)
    for number, rows in enumerate(divided.client_test.split.parts()):
        test_client[rows] = str(number)
    return fmr.from_arrays(
        source.x, labels(source.y), task="multilabel", client=client.astype(str), x_test=source.test_x,
        y_test=labels(source.test_y), client_test=test_client, mean=source.mean, std=source.std, name=request.name,
    )  # fmt: skip


fmr.SOURCES["digit_properties"] = load
