"""MovieLens 100K: 100,000 ratings of 1,682 films by 943 users, from 1 to 5, inside the wheel of RecBole.

Harper and Konstan, "The MovieLens datasets: history and context" (ACM Transactions on Interactive Intelligent Systems
5(4), 2015). Terms of GroupLens: for research, with acknowledgement, neither redistributed nor used commercially without
permission. So this package contains no rating; RecBole (MIT license) distributes them. Its wheel is installed without
its dependencies (PyTorch, Ray and versions that contradict ours), because only the file is read.
"""

import io

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import wheels
from fedjax_mr.data.sources.table import from_table

FILE = "dataset_example/ml-100k/ml-100k.inter"
DIGEST = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
INSTALL = "pip install --no-deps recbole==1.2.1"


def load(request: DataRequest) -> Dataset:
    """The ratings, x [M, 2] float32: the numbers of user and film, both categories; films without training rating: -1.

    Natural clients are the users.

    Raises:
      UserError: RecBole is not installed.
    """
    content = wheels.read(request.name, "recbole", FILE, digest=DIGEST, install=INSTALL)
    user, film, rating = np.loadtxt(io.BytesIO(content), np.int32, skiprows=1, usecols=(0, 1, 2)).T
    table = {"user": user, "film": film, "rating": rating}
    return from_table(
        table, "rating", task="regression", client=user, categorical=("user", "film"), name=request.name
    )  # fmt: skip
