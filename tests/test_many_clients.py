"""Federations of very many clients: nothing on the host takes a time per client that is felt."""

import numpy as np
import pytest

import fedjax_mr as fmr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold"])
def test_a_million_clients_with_the_picture(tmp_path, strategy):
    count = 1_000_000
    x = np.random.default_rng(0).normal(size=(3 * count, 2)).astype(np.float32)
    mine = fmr.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(3 * count) % count)
    config = fmr.Config(
        strategy=strategy, partition="natural", clients=0, cohort=4, model="logistic", rounds=2, eval_every=1,
        run_dir=str(tmp_path / "run"), progress=False,
    )  # fmt: skip
    result = fmr.run(config, dataset=mine)
    assert result.summary["rounds"] == 2 and len(np.load(result.folder / "partition.npz")["train_offsets"]) >= count
    assert (result.folder / "partition.png").stat().st_size > 10_000
