"""Survival of 228 patients with advanced lung cancer at 18 institutions, included in lifelines.

Loprinzi et al., "Prospective evaluation of prognostic variables from patient-completed questionnaires" (Journal of
Clinical Oncology 12(3), 1994), North Central Cancer Treatment Group. The table is a part of lifelines (MIT license) and
of R's package survival (LGPL). Time is in days; 165 patients died, 63 were censored. Six columns have missing values,
14 to 47 of ``wt.loss`` and ``meal.cal``, and one patient has no institution.
"""

import csv
import io

from fedjax_mr.data.federated import DataRequest, Dataset
from fedjax_mr.data.sources import wheels
from fedjax_mr.data.sources.table import from_table

FILE = "datasets/lung.csv"
DIGEST = "16ebd02c38bbb5708186d600cff80ad84d0764974619436f83ba4a605e77eb44"


def load(request: DataRequest) -> Dataset:
    """The patients, x [M, 7] float32: age, sex, three performance scores, calories of meals and loss of weight.

    Natural clients are the institutions.

    Raises:
      UserError: lifelines is not installed.
    """
    content = wheels.read(request.name, "lifelines", FILE, digest=DIGEST)
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    table = {name: [row[name] for row in rows] for name in rows[0]}
    institution = [number.removesuffix(".0") for number in table.pop("inst")]  # "": the patient without one
    return from_table(table, ("time", "status"), task="survival", client=institution, name=request.name)
