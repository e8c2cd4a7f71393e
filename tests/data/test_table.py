"""Tables: CSV files as people have them, pandas frames, and what is learned from the training rows alone."""

import dataclasses
import datetime
import logging

import numpy as np
import pytest

from fedjax_mr import data
from fedjax_mr.data import inputs
from fedjax_mr.data.facts import Facts
from fedjax_mr.data.preparation import Preparation
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import Regression

RNG = np.random.default_rng(0)
ROWS = 120
AGES = RNG.normal(60, 10, ROWS).round(1)


def patients(**changes):
    """A table of three hospitals with missing values, texts, truth values and numbers as categories."""
    table = {
        "hospital": np.repeat(["north", "south", "west"], [60, 40, 20]),
        "age": np.where(np.arange(ROWS) % 7 == 0, np.nan, AGES),
        "smoker": np.arange(ROWS) % 3 == 0,
        "blood type": [["A", "B", "0", None][row % 4] for row in range(ROWS)],
        "ward": 1 + np.arange(ROWS) % 5,
        "outcome": [["well", "ill"][row % 2] for row in range(ROWS)],
    }
    table |= changes
    return {name: values for name, values in table.items() if values is not None}


def from_patients(target="outcome", client="hospital", categorical=("ward",), changes=None, **more):
    return data.from_table(patients(**(changes or {})), target, client=client, categorical=categorical, **more)


def test_columns_become_numbers_and_categories():
    dataset = from_patients()
    prepared = dataset.preparation
    assert prepared.columns == ("age", "smoker", "blood type", "ward")
    assert prepared.categories == ((), (), ("0", "A", "B"), ("1", "2", "3", "4", "5"))
    assert (dataset.categories, dataset.class_names, dataset.num_classes) == ((0, 0, 3, 5), ("ill", "well"), 2)
    assert (prepared.target, prepared.class_names) == (("outcome",), ("ill", "well"))
    assert (dataset.x.dtype, dataset.x.shape, dataset.client_names) == (np.float32, (96, 4), ("north", "south", "west"))
    np.testing.assert_array_equal(np.bincount(dataset.client), [48, 32, 16])
    np.testing.assert_array_equal(np.bincount(dataset.test_client), [12, 8, 4])
    assert set(np.unique(dataset.x[:, 2])) == {-1, 0, 1, 2} and set(np.unique(dataset.x[:, 3])) == {0, 1, 2, 3, 4}
    assert dataset.mean[2:] == (0, 0) and dataset.std[2:] == (1, 1)
    assert repr(dataset).endswith("2 classes, 3 clients)")


def test_every_row_is_there_once_with_its_target():
    dataset = data.from_table(
        {"a": np.arange(50.0), "b": np.arange(50) / 2, "y": np.arange(50)}, "y", task="regression"
    )
    x, y = np.concatenate([dataset.x, dataset.test_x]), np.concatenate([dataset.y, dataset.test_y])
    np.testing.assert_array_equal(x, np.stack([y[:, 0], y[:, 0] / 2], 1))
    np.testing.assert_array_equal(np.sort(y[:, 0]), np.arange(50))


def test_only_training_rows_decide_medians_statistics_and_categories():
    table = {"age": np.r_[np.arange(80.0), np.nan], "kind": ["a", "b"] * 40 + ["a"], "y": [0, 1] * 40 + [0]}
    test = {"age": [1e4, np.nan], "kind": ["new", "b"], "y": [1, 0]}
    dataset = data.from_table(table, "y", test=test)
    assert dataset.preparation.fill == (39.5, -1)
    ages = np.r_[np.arange(80.0), 39.5]
    assert dataset.mean[0] == pytest.approx(ages.mean()) and dataset.std[0] == pytest.approx(ages.std())
    np.testing.assert_array_equal(dataset.test_x, [[1e4, -1], [39.5, 1]])
    whole = data.from_table(table, "y")
    known = whole.x[whole.x[:, 0] != whole.preparation.fill[0], 0]
    assert whole.preparation.fill[0] == np.median(known)  # of the rows that were not held out


def test_a_frame_a_dictionary_and_a_file_are_the_same_dataset(tmp_path):
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(patients())
    frame["ward"] = frame["ward"].astype("category")  # needs no mention
    frame["smoker"] = frame["smoker"].astype("boolean")
    frame.to_csv(tmp_path / "p.csv", index=False)
    pd.DataFrame(patients()).to_csv(tmp_path / "with row numbers.csv")
    frame.to_csv(tmp_path / "p.tsv", index=False, sep="\t", encoding="utf-8-sig")
    ours = from_patients(name="p")
    others = [data.from_table(frame, "outcome", client="hospital", name="p")]
    more = {"target": "outcome", "client_column": "hospital", "categorical": ["ward"]}
    others += [data.load(tmp_path / name, **more) for name in ("p.csv", "with row numbers.csv", "p.tsv")]
    for other in others:
        assert other.preparation == ours.preparation
        assert other.recorded_name().rpartition(":")[2] == ours.recorded_name().rpartition(":")[2]


def test_a_file_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "messy.csv"
    lines = [
        '\ufeff Body mass ; name; "site";ill',
        "",
        *(f'{20 + row}.5 ;"a;b";{row % 2:02};{row % 3 > 0}' for row in range(30)),
    ]
    path.write_text("\r\n".join(lines), encoding="utf-8")
    dataset = data.load(path, target="ill", client_column="site", task="multilabel")
    assert dataset.preparation.columns == ("Body mass", "name") and dataset.client_names == ("00", "01")
    assert dataset.preparation.categories == ((), ("a;b",)) and dataset.task.name == "multilabel"


def test_numbers_of_categories_have_no_unit():
    table = {
        "film": np.arange(2000),
        "user": np.arange(2000) % 700,
        "x": RNG.normal(size=2000),
        "y": np.arange(2000) % 2,
    }
    assert list(inputs.notes(data.from_table(table, "y", categorical=["film", "user"]))) == []
    assert list(inputs.notes(data.from_table(table, "y", categorical=["film", "user"], drop=["x"]))) == []


def test_arrays_may_have_categories_too(tmp_path):
    x, y = np.stack([RNG.normal(size=60), np.arange(60) % 3], 1), np.arange(60) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y, categories=[0, 3])
    assert data.load(tmp_path / "mine.npz").categories == (0, 3)
    with pytest.raises(UserError, match="categories has 1 numbers, but needs one for each column of a table"):
        data.from_arrays(x, y, categories=[3])


def test_the_names_of_clients_keep_the_order_of_numbers():
    table = {"x": np.arange(40.0), "site": np.repeat(["1", "2", "10", "3"], 10), "y": np.arange(40) % 2}
    assert data.from_table(table, "y", client="site").client_names == ("1", "2", "3", "10")
    floats = table | {"site": np.repeat([1.0, 2.0, 10.0, 3.0], 10)}
    assert data.from_table(floats, "y", client="site").client_names == ("1", "2", "3", "10")
    own = data.from_table(table, "y", client=np.repeat(["", "a"], 20), drop=["site"])
    assert own.client_names == ("a",) and own.client.min() == -1


def test_targets_of_other_tasks():
    number, yes = RNG.normal(size=ROWS), np.where(np.arange(ROWS) % 9 == 0, np.nan, np.arange(ROWS) % 2)
    several = {"dose": number, "dose 2": 3 * number, "fever": yes, "cough": np.arange(ROWS) % 3 == 0}
    one = from_patients("dose", changes={"dose": number, "outcome": None}, task="regression")
    assert one.y.shape == (96, 1) and one.task.std[0] == pytest.approx(one.y.std())
    two = from_patients(("dose", "dose 2"), changes=several, task=Regression(width=2, unit="mg"))
    assert (two.y.shape, two.task.unit) == ((96, 2), "mg")
    labels = from_patients(("fever", "cough"), changes=several, task="multilabel")
    assert labels.y.dtype == np.int32 and set(np.unique(labels.y[:, 0])) == {-1, 0, 1}  # -1: unknown
    times = {"days": np.arange(ROWS) + 1, "died": np.arange(ROWS) % 2}
    survival = from_patients(("days", "died"), changes=times, task="survival")
    assert survival.y.shape == (96, 2) and survival.task.times
    everyone = from_patients(("days", "died"), changes=times | {"died": np.ones(ROWS)}, task="survival")
    assert (everyone.y[:, 1] == 1).all()
    numbers = data.from_table({"x": np.arange(60.0), "y": np.repeat([2, 10, 3], 20)}, "y")
    assert numbers.class_names == ("2", "3", "10")


def test_new_rows_are_prepared_in_the_same_way(caplog):
    dataset = from_patients()
    prepared = Preparation.of_json(dataset.preparation.to_json())
    assert prepared == dataset.preparation
    table = patients()
    x = prepared.apply({name: table[name] for name in table if name not in ("outcome", "hospital")})
    assert sorted(map(bytes, x)) == sorted(map(bytes, np.concatenate([dataset.x, dataset.test_x])))
    assert not caplog.records
    new = {"ward": [3.0, "3.0", " 3 ", "seven", None], "age": ["", "NA", "61", None, np.nan], "smoker": ["TRUE"] * 5,
           "blood type": ["A"] * 5, "unused": ["?"] * 5}  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="absl"):
        x = prepared.apply(new, "new.csv")
    fill = np.float32(prepared.fill[0])
    np.testing.assert_array_equal(x.T, [[fill, fill, 61, fill, fill], [1] * 5, [1] * 5, [2, 2, 2, -1, -1]])
    assert [record.getMessage() for record in caplog.records] == [
        "new.csv: column 'ward' has 1 values that no training row has (the first is 'seven'): they count as missing"
    ]
    with pytest.raises(
        UserError, match=r"new.csv has no column 'blood type' for the samples: it has ward, age, smoker"
    ):
        prepared.apply({name: new[name] for name in ("ward", "age", "smoker")}, "new.csv")
    with pytest.raises(UserError, match=r"column 'age' has texts, but the training rows have numbers"):
        prepared.apply(new | {"age": ["old"] * 5})


@pytest.mark.parametrize("text", ["", "[]", '{"columns": ["a"]}', '{"columns": ["a"], "categories": [], "fill": [1], '
                                  '"target": [], "class_names": []}'])  # fmt: skip
def test_a_damaged_preparation(text):
    with pytest.raises(ValueError, match=r"."):
        Preparation.of_json(text)


def test_the_name_in_a_run_folder_covers_classes_categories_and_preparation():
    dataset = from_patients()
    changed = [
        {"class_names": ("no", "yes")}, {"categories": (0, 0, 4, 5)},
        {"preparation": dataclasses.replace(dataset.preparation, columns=("a", "b", "c", "d"))},
    ]  # fmt: skip
    names = {dataclasses.replace(dataset, **each).recorded_name() for each in ({}, *changed)}
    assert len(names) == 4 and dataset.recorded_name() == from_patients().recorded_name()
    taken = dataset.take(np.arange(5), np.arange(3))
    assert taken.preparation is dataset.preparation and taken.class_names == dataset.class_names
    assert Facts.parse(Facts.of(dataset).text()).categories == (0, 0, 3, 5)


DATES = np.arange("2020-01-01", "2020-04-30", dtype="M8[D]")
OTHER_TYPES = [datetime.datetime(2020, 1 + row % 12, 1, tzinfo=datetime.UTC) for row in range(ROWS)]
DAYS = [f"{1 + row % 28}/02/20{row % 10}1" for row in range(ROWS)]
AGE = np.arange(ROWS)
NOTES = {"notes": [f"patient {row}" for row in range(ROWS)]}
REFUSED = {
    "no column": (dict(target="result"), "table has no column 'result' for the target: it has hospital, age, smoker"),
    "no client": (dict(client="site"), "has no column 'site' for the client"),
    "no categorical": (dict(categorical=["bed"]), "has no column 'bed' for the samples (categorical=)"),
    "dropped": (dict(drop=["bed"]), "has no column 'bed' for drop="),
    "nothing left": (
        dict(drop=["age", "smoker", "ward", "blood type"], categorical=()), "no column for the samples beside target"),
    "target missing": (
        dict(changes={"outcome": ["ill", None, "well"] * 40}), "missing in 40 of 120 rows (the first is row 1"),
    "client missing": (
        dict(changes={"hospital": ["a", "b", "NA"] * 40}), "the client is missing in 40 of 120 rows (the first is row"),
    "constant": (dict(changes={"outcome": ["ill"] * ROWS}), "has the value 'ill' in every row: there is"),
    "constant number": (
        dict(task="regression", changes={"outcome": [3] * ROWS}), "has the value 3 in every row: there is nothing"),
    "no event": (
        dict(target=("age", "outcome"), task="survival", changes={"outcome": [0] * ROWS, "age": AGE}),
        "target column 'outcome' has the value 0 in every row"),
    "free text": (dict(changes=NOTES), "column 'notes' has 120 different texts in 120 rows (such as 'patient 0')"),
    "dates": (dict(changes={"seen": DATES}), "column 'seen' has dates or other objects (such as '2020-01-01')"),
    "dates with zones": (dict(changes={"seen": OTHER_TYPES}), "column 'seen' has dates or other objects"),
    "dates as texts": (dict(changes={"seen": DAYS}), "has dates or other objects (such as '1/02/2001')"),
    "percent": (dict(changes={"share": [f"{row} %" for row in AGE]}), "has '0 %' in row 0: write plain numbers"),
    "unit": (dict(changes={"dose": [f"{row} mg" for row in AGE]}), "column 'dose' has '0 mg' in row 0: write plain"),
    "comma": (dict(changes={"dose": ["1,5", "2,5"] * 60}), "has '1,5' in row 0: write plain numbers such as 12.5"),
    "mixed": (
        dict(changes={"dose": [1.5, "unknown"] * 60}), "has numbers, but 60 of 120 values are texts (the first"),
    "infinite": (dict(changes={"dose": np.r_[np.inf, AGE[1:]]}), "column 'dose' has an infinite value in row 0"),
    "empty": (dict(changes={"dose": [None] * ROWS}), "column 'dose' has no values in the training rows: drop"),
    "empty category": (
        dict(changes={"dose": [""] * ROWS}, categorical=["dose"]), "column 'dose' has no values in the training rows"),
    "numbers as classes": (
        dict(changes={"outcome": RNG.normal(size=ROWS)}), "too many for classes: predict numbers with task='reg"),
    "ids as classes": (dict(changes={"outcome": AGE}), "has 120 different values (such as '0'), too many for classes"),
    "texts as numbers": (
        dict(task="regression"), "'outcome' has texts, but regression needs numbers; for classes use task='classif"),
    "texts as labels": (dict(task="multilabel"), "has texts, but multilabel needs numbers: write 1 for yes, 0 for no"),
    "other labels": (
        dict(task="multilabel", changes={"outcome": [1, 2] * 60}), "'outcome' has 2 in row 1: write 1 for yes"),
    "one for two": (dict(task="survival"), "survival needs two target columns, time and event, not outcome"),
    "two for one": (dict(target=("age", "ward")), "classification needs one target column, not 2; for several"),
    "the same twice": (dict(target=("age", "age"), task="regression"), "a target column is named twice: age, age"),
    "no task of a table": (dict(task="language"), "a table has targets for classification, multilabel"),
    "unknown task": (dict(task="regresion"), "unknown task 'regresion'; did you mean 'regression'?"),
    "lengths": (dict(changes={"dose": [1.0]}), "table has columns of different lengths, 1 and 120"),
    "two dimensions": (dict(changes={"dose": np.zeros((ROWS, 2))}), "but a column has one value per row"),
    "test": (dict(test={"age": [1.0]}), "table (test) has no column 'smoker' for what the training rows have"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        from_patients(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


FILES = {
    "no rows": ("a,b\n", "has no rows below its first line"),
    "nothing": ("", "is empty"),
    "ragged": ("a,b\n1,2\n1,2,3\n", "line 3: 3 values, but the first line names 2 columns: put values with commas"),
    "no name": ("a,,b\n1,2,3\n", "column 2 has no name in the first line"),
    "the same name": ("a, a\n1,2\n", "has two columns 'a': rename one"),
    "quotation": ('a,b\n"1,2\n', "is no table of comma-separated values (unexpected end of data)"),
    "encoding": ("a,b\n1,\xe9\n".encode("latin-1"), "is not in UTF-8: save it as 'CSV UTF-8'"),
}


@pytest.mark.parametrize("case", FILES)
def test_refuses_files(case, tmp_path):
    content, message = FILES[case]
    (tmp_path / "p.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        data.load(tmp_path / "p.csv", target="b")
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path / "p.csv"))


def test_which_arguments_a_dataset_takes(tmp_path):
    (tmp_path / "p.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"p.csv is a table: name the column to predict, --target=COLUMN or from_table"):
        data.load(tmp_path / "p.csv")
    with pytest.raises(UserError, match=r"absent.csv does not exist"):
        data.load(tmp_path / "absent.csv", target="b")
    with pytest.raises(UserError, match="digits has no setting target=: it has none"):
        data.load("digits", target="label")
    with pytest.raises(UserError, match="table is a list: pass a pandas frame, a dictionary of columns or a CSV file"):
        data.from_table([1, 2], "a")


def test_many_whole_numbers_are_classes_only_if_the_task_is_named():
    table = {"x": np.arange(240.0), "age": np.arange(240) % 40}
    with pytest.raises(UserError, match=r"'age' has 40 different values .* classes, say task='classification'"):
        data.from_table(table, "age")
    assert data.from_table(table, "age", task="classification").num_classes == 40
    assert data.from_table({"x": np.arange(240.0), "age": np.arange(240) % 30}, "age").num_classes == 30


@pytest.mark.parametrize(("scale", "rows", "warned"), [(1, 100, True), (1, 99, False), (0.5, 100, False)])
def test_a_column_that_numbers_the_rows_is_named(scale, rows, warned, caplog):
    order = np.random.default_rng(0).permutation(rows) * scale
    data.from_table({"patient": order, "age": np.arange(rows) % 50, "ill": np.arange(rows) % 2}, "ill", name="ward")
    assert ("ward: column 'patient' has another whole number in each of 100 rows" in caplog.text) == warned
    assert "'age'" not in caplog.text
