"""The 442 patients with diabetes that are included in scikit-learn: regression without a download.

Efron, Hastie, Johnstone and Tibshirani, "Least angle regression" (Annals of Statistics 32(2), 2004). The target is a
measure of the progression of the disease one year after the ten measurements. scikit-learn has the BSD license; its
description of the table names none. As for the digits, its files are read without an import of scikit-learn.
"""

import gzip

import numpy as np

from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import wheels
from fedjax_mr.data.sources.table import from_table

COLUMNS = (
    "age", "sex", "body mass index", "blood pressure", "total cholesterol", "low-density lipoproteins",
    "high-density lipoproteins", "cholesterol ratio", "log triglycerides", "blood sugar",
)  # fmt: skip
FILES = {
    "datasets/data/diabetes_data_raw.csv.gz": "7fc0ded571454b1982210d3bb43f0aca44eae01a0b8654a3b24022bdb6b38009",
    "datasets/data/diabetes_target.csv.gz": "8e53f65eb811df43c206f3534bb3af0e5fed213bc37ed6ba36310157d6023803",
}


def load(request: DataRequest) -> Dataset:
    """The patients, x [M, 10] float32. There are no natural clients.

    Raises:
      UserError: scikit-learn keeps other files.
    """
    data, target = (
        np.loadtxt(gzip.decompress(wheels.read(request.name, "sklearn", file, digest=digest)).decode().splitlines())
        for file, digest in FILES.items()
    )
    table = dict(zip(COLUMNS, data.T, strict=True)) | {"progression": target}
    return from_table(table, "progression", task="regression", name=request.name)
