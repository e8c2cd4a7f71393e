"""Files of samples of real clients and their server: the kind of all samples is the server's, and faults are named."""

import numpy as np
import pytest

from fedjax_mr.data.facts import Facts
from fedjax_mr.deploy.protocol import Member
from fedjax_mr.deploy.samples import ClientSamples, ServerSamples
from fedjax_mr.errors import UserError

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
