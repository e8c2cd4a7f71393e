"""Files of samples of real clients and their server: the kind of all samples is the server's, and faults are named."""

import numpy as np
import pytest

from fedjax_mr.data.facts import Facts
from fedjax_mr.deploy.protocol import MAX_SAMPLES, Member, remote_data
from fedjax_mr.deploy.samples import ClientSamples, ServerSamples
from fedjax_mr.errors import UserError
from fedjax_mr.tasks import Regression, with_metrics

IMAGES, LABELS = np.zeros((3, 4, 4), np.uint8), np.array([0, 2, 1])


def kept(folder, **arrays):
    path = folder / "samples.npz"
    np.savez(path, **arrays)
    return path


def facts_of(folder):
    return ServerSamples.read(kept(folder, test_x=IMAGES, test_y=LABELS)).facts


def test_a_servers_own_test_set_says_the_kind_of_all_samples(tmp_path):
    plain = facts_of(tmp_path)
    assert (plain.shape, plain.dtype, plain.num_classes, plain.mean) == ((4, 4, 1), "uint8", 3, (0.5,))
    told = ServerSamples.read(kept(tmp_path, test_x=IMAGES, test_y=LABELS, num_classes=5, mean=[0.1], std=[0.2])).facts
    assert (told.num_classes, told.mean, told.std) == (5, (0.1,), (0.2,))
    public = ServerSamples.read(kept(tmp_path, test_x=IMAGES, test_y=LABELS, public_x=IMAGES, facts=plain.text()))
    assert public.facts == plain and public.public is not None and public.public.y is None


def test_a_clients_file_may_lack_test_and_validation_samples(tmp_path):
    facts = facts_of(tmp_path)
    share = ClientSamples.read(kept(tmp_path, x=IMAGES, y=LABELS), facts)
    assert share.x.shape == (3, 4, 4, 1) and len(share.test_y) == len(share.validation_y) == 0


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": IMAGES}, "needs arrays x and y"),
        ({"x": IMAGES, "y": LABELS, "test_x": IMAGES}, "needs arrays test_x and test_y"),
        ({"x": IMAGES[:, :3], "y": LABELS}, "samples of samples are"),
        ({"x": IMAGES, "y": LABELS + 1}, "must be 3 labels from 0 to 2"),
        ({"x": IMAGES, "y": LABELS[:2]}, "must be 3 labels from 0 to 2"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "holds no training samples"),
    ],
)
def test_faults_of_a_clients_file_are_named(tmp_path, arrays, said):
    facts = facts_of(tmp_path)
    with pytest.raises(UserError, match=said):
        ClientSamples.read(kept(tmp_path, **arrays), facts)


def test_a_servers_file_declares_the_task_and_its_facts(tmp_path):
    """Numbers of any type become [n, 1] float32. Without a declared mean, that of the server's targets counts."""
    x, y = np.zeros((4, 2), np.float32), np.array([1, 2, 3, 6])
    own = {"target_mean": 2.0, "target_std": [4.0], "target_unit": "mg"}
    facts = ServerSamples.read(kept(tmp_path, test_x=x, test_y=y, task="regression", **own)).facts
    assert facts.task == with_metrics(Regression(width=1, mean=(2.0,), std=(4.0,), unit="mg"))
    assert Facts.parse(facts.text()) == facts
    for targets in (y, y.astype(float), y[:, None].astype(np.float32)):
        read = ClientSamples.read(kept(tmp_path, x=x, y=targets), facts)
        assert read.y.shape == (4, 1) and read.y.dtype == read.test_y.dtype == np.float32
    plain = ServerSamples.read(kept(tmp_path, test_x=x, test_y=y, task="regression")).facts.task
    np.testing.assert_allclose((plain.mean, plain.std), ([3.0], [np.std(y)]))


def test_num_classes_is_the_width_of_other_tasks(tmp_path):
    """The server's samples need not have all classes, labels or tokens."""
    masks, texts = np.ones((3, 4, 4), np.uint8), np.array([[1, 2], [2, 1]])
    facts = ServerSamples.read(kept(tmp_path, test_x=IMAGES, test_y=masks, task="segmentation", num_classes=3)).facts
    assert ClientSamples.read(kept(tmp_path, x=IMAGES, y=2 * masks), facts).y.max() == 2
    facts = ServerSamples.read(kept(tmp_path, test_x=texts, test_y=texts, task="language", num_classes=9)).facts
    assert ClientSamples.read(kept(tmp_path, x=4 * texts, y=3 * texts), facts).x.max() == 8


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"task": "regresion"}, "samples.npz: unknown task 'regresion'; did you mean 'regression'"),
        (
            {"task": "regression", "target_mean": [1.0, 2.0]},
            "mean of the targets must be a number, or one for each of 1",
        ),
        ({"task": "regression", "target_std": 0.0}, "std of the targets must be a positive number"),
        ({"task": "regression", "target_std": "x"}, "std of the targets must be a positive number"),
        ({"task": "regression", "target_slope": 1.0}, "the task regression has no slope"),
        ({"task": "regression", "num_classes": 2}, "needs floating-point numbers of shape"),
        ({"target_mean": 1.0}, "the task classification has no mean"),
        ({"task": "survival"}, r"needs floating-point numbers of shape \(2,\)"),
    ],
)
def test_faults_of_a_declared_task_are_named(tmp_path, declared, said):
    with pytest.raises(UserError, match=said):
        ServerSamples.read(kept(tmp_path, test_x=IMAGES, test_y=LABELS / 2, **declared))


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.array([1.0, np.nan, 2.0]), "has a target that is missing or not finite in row 1"),
        (np.array([1.0, 2.0]), "must be 3 targets, one per sample"),
        (np.array(1.0), "must be 3 targets, one per sample"),
        (np.ones((3, 2)), r"needs floating-point numbers of shape \(1,\)"),
        (np.array(["a", "b", "c"]), "needs floating-point numbers"),
    ],
)
def test_faults_of_a_clients_numbers_are_named(tmp_path, y, said):
    facts = ServerSamples.read(kept(tmp_path, test_x=IMAGES, test_y=LABELS, task="regression")).facts
    with pytest.raises(UserError, match=said):
        ClientSamples.read(kept(tmp_path, x=IMAGES, y=y), facts)


@pytest.mark.parametrize("y", [LABELS, LABELS / 2, np.ones((3, 2)), np.ones((3, 2), int), np.ones((3, 4, 4), int)])
def test_a_clients_file_alone_may_have_targets_of_any_task(tmp_path, y):
    """Only the server's file says which; it is not on the client's machine."""
    assert len(ClientSamples.read(kept(tmp_path, x=IMAGES, y=y), None).y) == 3


def test_a_client_that_claims_many_masks_makes_no_array_of_them(tmp_path):
    masks = np.ones((3, 512, 512), np.uint8)
    server = ServerSamples.read(kept(tmp_path, test_x=masks, test_y=masks, task="segmentation"))
    federated = remote_data([Member(0, MAX_SAMPLES, 0, 0, ())], server)
    assert federated.sizes.tolist() == [MAX_SAMPLES] and federated.dataset.y.nbytes < 2**21
    assert federated.hash() != remote_data([Member(0, 5, 0, 0, ())], server).hash()


@pytest.mark.parametrize("arrays", [{"test_x": IMAGES}, {"test_x": IMAGES, "test_y": LABELS, "facts": "{}"}])
def test_a_file_that_is_no_servers_is_refused(tmp_path, arrays):
    with pytest.raises(UserError, match="is not a file of a server"):
        ServerSamples.read(kept(tmp_path, **arrays))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({}, "malformed"),
        ({"client": 9}, "client-id 9; clients are numbered 0 to 2"),
        ({"size": True}, "whole numbers"),
        ({"label_counts": [5, 5]}, "label counts with another sum"),
    ],
)
def test_an_answer_at_the_roll_call_is_checked(record, said):
    good = Member(1, 5, 0, 0, (2, 3)).record()
    content = {"member": good | record if record else {}}
    with pytest.raises(UserError, match=said):
        Member.of(content, num_clients=3, num_classes=2, counted=True)
    assert Member.of({"member": good}, num_clients=3, num_classes=2, counted=True).label_counts == (2, 3)


def test_facts_go_through_text():
    facts = Facts("toy", (2,), "float32", 3, (0.0,), (1.0,), 0.0, 1.0)
    assert Facts.parse(facts.text()) == facts
