"""Information about samples in uploads and recombined models: membership inference and gradient inversion.

One more round is played from a checkpoint with the run's own strategy, exchange of layers and channel. Two parties
look: the server at the uploads as they reach its update (after an exchange before the upload, and after the channel),
and a client at the model that it receives in the next round. Both know the networks that were sent in this round.

Membership inference (see `membership`). Members are the training samples of the client that sent an upload, and those
of all clients of the round for a model of the next round. After an exchange the server cannot know the owner of a
layer; the sender counts as owner. Other samples come from one half of the test set, in the same numbers per label as
the members, because with non-IID clients the labels alone would separate them. The shadow attack has the other half of
the test set, in two parts: in each shadow round, the clients of a cohort train on random samples of the first part,
with the sizes of the real clients and the run's settings; no client trains on the second part. Most members were
trained on in earlier rounds, too, so this round alone does not explain an AUC above 0.5.

Gradient inversion (see `inversion`). A federation of K clients with B training samples each takes one step of plain SGD
from one network; all K models are that network. The attacker takes the change of a model, over the learning rate, for
the gradient of a single client, and matches all tensors or the largest tensor alone, as its gradient needs no other
layer's. It knows the labels of the client whose gradient is nearest, the *source*. This is more than a real attacker of
FedMR or FedCross knows, whose models differ. Restored images are compared with those of the source, in the best order.
The control compares the same restored images with other training images of the same labels. An attack counts as
identified if the restored images correlate more with those of the source than with those of any other client; 1 / K is
chance.

Limits. If an attack succeeds, the models leak. If it fails, a stronger attack may still succeed (with many shadow
models per sample, priors of images or several rounds). Only differential privacy limits all attacks.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import image_rows
import inversion
import membership
from fedjax_mr import files, trees
from fedjax_mr.analysis import command, runs, tables
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, gather
from fedjax_mr.config import config as configuration
from fedjax_mr.data import FederatedData
from fedjax_mr.engine.clients import positions
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.program import Program
from fedjax_mr.engine.round import (
    DISPATCH,
    SERVER,
    Progress,
    RunConstants,
    begin,
    dispatch,
    finish,
    plan,
    receive,
    round_key,
    train_client,
)
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.simulator import normalised
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import REAL_CLIENTS, require_same_data
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model, Variables
from fedjax_mr.strategies.interface import Payload
from fedjax_mr.terminal import interrupts

RESULTS = "leakage.json"  # results by `configuration.portable_name` of the run
COLUMNS = 8  # images per row of the picture
ROWS = 256  # numbers of samples are rounded up to multiples, so that few programs are compiled
UPLOAD, NEXT = "upload (server)", "next model (client)"


class Seen(NamedTuple):
    """The models [K, ...] that the parties see in a round, in the order of the cohort."""

    ids: jax.Array  # [K] clients
    sent: Variables  # received by the clients of this round
    uploads: Variables  # as they reach the server's update
    following: Variables  # received by the clients of the next round


class Score(NamedTuple):
    """The success of an attack on membership: means and sample standard deviations (None of a single one)."""

    auc: float
    auc_deviation: float | None
    true_positives: float  # at 1 % false positives
    true_positives_deviation: float | None
    samples: float  # members per model, and as many others


class Restored(NamedTuple):
    """The success of a gradient inversion on several models; PSNR in dB."""

    batch: int
    view: str
    tensors: str  # ``all`` or ``largest``
    psnr: float
    psnr_deviation: float | None
    control: float  # the same restored images beside other images of the same labels
    control_deviation: float | None
    identified: float  # share of attacks whose result correlates the most with the source, of all K clients
    cosine: float  # between the gradient of the nearest client and what the attacker takes for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_picture_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument(
        "--only", choices=("membership", "inversion"), default=None, help="a single attack. Default: both"
    )
    parser.add_argument(
        "--round", type=int, default=None, help="round of the checkpoint. Default: the newest of each run"
    )
    parser.add_argument(
        "--shadows", type=int, default=2, help="shadow rounds, each with a cohort of shadow models. Default: 2"
    )
    parser.add_argument(
        "--batch_sizes", default="1,2,4", metavar="B,...", help="samples per victim of the inversion. Default: 1,2,4"
    )
    parser.add_argument(
        "--victims", type=int, default=4, help="models that the inversion attacks, at most the cohort. Default: 4"
    )
    parser.add_argument("--steps", type=int, default=400, help="steps of the inversion. Default: 400")
    parser.add_argument(
        "--start",
        choices=("deployed", "initial"),
        default="deployed",
        help="network of the inversion: that of the checkpoint, or a new one. Default: deployed",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of samples and attacks. Default: 0")


def main(arguments: argparse.Namespace) -> None:
    """Attack the runs, print and save how well it worked, and draw the restored images."""
    sizes = check(arguments)
    records = runs.read(arguments.runs)
    with runs.output_folder(arguments.out, records) as folder:
        _attack(arguments, sizes, records, folder)


def _attack(arguments: argparse.Namespace, sizes: list[int], chosen: Sequence[runs.RunRecord], folder: Path) -> None:
    members: list[tuple[str, ...]] = [("run", "view", "attack", "AUC", "true positives at 1 %", "members")]
    restored: list[tuple[str, ...]] = [
        ("run", "B", "view", "tensors", "PSNR (dB)", "control (dB)", "identified", "cosine")
    ]
    results: dict[str, Any] = {}
    how = {name: getattr(arguments, name) for name in ("shadows", "steps", "victims", "start", "seed")}
    how |= {"batch_sizes": sizes}
    for run in chosen:
        victim = open_run(run, round=arguments.round, data_dir=arguments.data_dir, trust=arguments.trust)
        if arguments.only != "membership":
            require_images(victim, run)
        name = configuration.portable_name(run.config)
        facts: dict[str, Any] = {"round": int(victim.progress.round)}
        if arguments.only != "inversion":
            scores = infer_membership(victim, shadows=arguments.shadows, seed=arguments.seed)
            facts["membership"] = {
                view: {attack: s._asdict() for attack, s in row.items()} for view, row in scores.items()
            }
            members += [_cells(run.name, view, attack, s) for view, row in scores.items() for attack, s in row.items()]
        if arguments.only != "membership":
            numbers, rows = invert(
                victim,
                sizes,
                steps=arguments.steps,
                count=arguments.victims,
                start=arguments.start,
                seed=arguments.seed,
            )
            facts["inversion"] = [result._asdict() for result in numbers]
            for result in numbers:
                both = (result.psnr, result.psnr_deviation), (result.control, result.control_deviation)
                texts = [tables.plus_minus(*pair, digits=1) for pair in both]
                cells = (
                    run.name,
                    str(result.batch),
                    result.view,
                    result.tensors,
                    *texts,
                    f"{result.identified:.2f}",
                    f"{result.cosine:.3f}",
                )
                restored.append(cells)
            path = folder / f"leakage-{name}.{arguments.format}"
            image_rows.draw(rows, path)
            print(f"drawn in {path}", flush=True)
        results[name] = facts
        with files.atomic_write(folder / RESULTS) as file:  # after each run, because the next one takes minutes
            file.write_text(json.dumps(how | {"runs": results}, indent=2) + "\n", encoding="utf-8")
    print("\n\n".join(tables.aligned(table) for table in (members, restored) if len(table) > 1))
    print(f"kept in {folder / RESULTS}")


def _cells(name: str, view: str, attack: str, score: Score) -> tuple[str, ...]:
    auc = tables.plus_minus(score.auc, score.auc_deviation, digits=3)
    positives = tables.plus_minus(score.true_positives, score.true_positives_deviation, digits=3)
    return name, view, attack, auc, positives, f"{score.samples:.0f}"


def check(arguments: argparse.Namespace) -> list[int]:
    """Check the ranges of the arguments and return the batch sizes.

    Raises:
      UserError: an argument is out of its range.
    """
    for name, low, high in (("shadows", 1, 1000), ("victims", 1, 10_000), ("steps", 1, 10**6), ("seed", 0, 2**31 - 1)):
        if not low <= getattr(arguments, name) <= high:
            raise UserError(f"--{name}={getattr(arguments, name)} is out of range: it must be from {low} to {high}")
    parts = arguments.batch_sizes.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= 64 for part in parts):
        raise UserError(
            f"--batch_sizes={arguments.batch_sizes} must be numbers from 1 to 64 with commas, such as 1,2,4"
        )
    return list(dict.fromkeys(map(int, parts)))


# --- One more round of a run ------------------------------------------------------------------------------------------


class Victim(NamedTuple):
    """A run at a checkpoint, on one device."""

    rebuilt: runs.Rebuilt
    progress: Progress


def open_run(run: runs.RunRecord, *, round: int | None, data_dir: str | None, trust: bool) -> Victim:
    """Restore a run that the attacks understand.

    Raises:
      UserError: as `runs.restore`; or a round of it cannot be repeated here, or it trains several networks.
    """
    rebuilt = runs.rebuild(run, data_dir=data_dir, trust=trust, memory="device", data_placement="device")
    rounds, method = rebuilt.rounds, run.config.strategy
    if len(rebuilt.model.networks) > 1:
        raise UserError(f"{run.path}: its clients have different networks, and the attacks are for one network")
    if rounds.strategy.between_rounds is not None:
        raise UserError(f"{run.path}: {method} works on the host between rounds, and the attacks need whole rounds")
    if rounds.strategy.init_memory is not None and (run.path / REAL_CLIENTS).exists():
        raise UserError(f"{run.path}: real clients trained it and keep the memories of {method} on their own machines")
    checkpoints = Checkpoints(run.path / "checkpoints")
    template = rounds.shapes(kept=checkpoints.kept_memories(round))
    progress, meta = checkpoints.restore_run(template, round, model=rebuilt.model)
    require_same_data(run.path, meta, rebuilt.federated)
    return Victim(rebuilt, rounds.place(progress))


def play(rounds: Rounds, constants: RunConstants, progress: Progress) -> Seen:
    """Play one round, and select and dispatch for the next one. Nothing is consumed.

    Raises:
      UserError: the messages do not contain whole models.
    """

    def program(constants: RunConstants, progress: Progress) -> Seen:
        strategy, problem, key = constants.strategy, constants.problem, constants.key
        chosen, rows = begin(rounds.axis, constants, progress)
        trained = jax.lax.map(lambda row: train_client(constants, progress.round, row), rows)
        messages = trees.take(trained[0], positions(chosen.slots, problem.cohort_size))
        payloads = dispatch(strategy, progress.server, chosen.cohort, round_key(key, DISPATCH, progress.round))
        server_key = round_key(key, SERVER, progress.round)
        uploads = receive(
            strategy, progress.server, messages, payloads, chosen.cohort, progress.round, server_key
        )[1]  # fmt: skip
        after, _ = finish(constants, progress, chosen, trained)
        cohort = plan(rounds.axis, constants, after.server, after.round).cohort
        following = dispatch(strategy, after.server, cohort, round_key(key, DISPATCH, after.round))
        models = [whole_models(problem.model, message) for message in (payloads, uploads, following)]
        return Seen(chosen.cohort.ids, *models)

    if "leakage" not in rounds.programs:
        rounds.programs["leakage"] = Program(program)
    return rounds.programs["leakage"](constants, progress)


def whole_models(model: Model, message: Payload) -> Variables:
    """The models [K, ...] of payloads or uploads.

    Raises:
      UserError: there are none, or only parts of models.
    """
    found: Any = message.get("model")
    shapes = model.shapes()
    kind = lambda tree, first: jax.tree.map(lambda leaf: leaf.shape[first:], tree)
    if jax.tree.structure(found) != jax.tree.structure(shapes) or kind(found, 1) != kind(shapes, 0):
        raise UserError("the attacks need messages with whole models; this method sends something else")
    return found


# --- Membership inference ---------------------------------------------------------------------------------------------


def infer_membership(victim: Victim, *, shadows: int, seed: int) -> dict[str, dict[str, Score]]:
    """The success of both attacks in both views.

    Raises:
      UserError: the test set is too small, or has none of the members' labels.
    """
    (_, federated, model, rounds), progress = victim
    dataset, rng = federated.dataset, np.random.default_rng(seed)
    known, count = rounds.constants, len(dataset.y)
    if len(dataset.test_y) < 8:
        raise UserError(f"{dataset.name} has {len(dataset.test_y)} test samples; membership inference needs at least 8")
    # One array of training and test samples, so that real and shadow rounds are the same program.
    x, y = np.concatenate([dataset.x, dataset.test_x]), np.concatenate([dataset.y, dataset.test_y])
    samples = normalised(dataset, x, y)
    others, inside, outside = np.split(
        count + rng.permutation(len(dataset.test_y)), [len(dataset.test_y) // 2, 3 * len(dataset.test_y) // 4]
    )
    offsets = np.asarray(known.federation.offsets)
    kept = known.problem.validation_sizes
    sizes = np.diff(offsets) - (0 if kept is None else np.asarray(kept))
    outputs = _outputs(model, samples)

    def views(key: jax.Array, index: np.ndarray, unseen: np.ndarray) -> dict[str, list[tuple[np.ndarray, ...]]]:
        """For each view and model: the logits and labels of members, and those of other samples."""
        federation = known.federation._replace(samples=samples, index=index)
        seen = play(rounds, known._replace(federation=federation, key=key), progress)
        members_of = [
            np.unique(index[offsets[client] : offsets[client] + sizes[client]]) for client in np.asarray(seen.ids)
        ]
        everyone = np.unique(np.concatenate(members_of))
        attacked = {
            UPLOAD: (seen.uploads, [membership.matched(rows, y[rows], unseen, y[unseen], rng) for rows in members_of]),
            NEXT: (
                seen.following,
                [membership.matched(everyone, y[everyone], unseen, y[unseen], rng)] * len(members_of),
            ),
        }
        outputs_of = {}
        for view, (models, pairs) in attacked.items():
            logits = outputs(models, [np.concatenate(pair) for pair in pairs])
            outputs_of[view] = [
                (rows[: len(a)], y[a], rows[len(a) :], y[b])
                for rows, (a, b) in zip(logits, pairs, strict=True)
                if len(a)
            ]
        return outputs_of

    lessons: dict[str, list[tuple[np.ndarray, ...]]] = {UPLOAD: [], NEXT: []}
    for number in tqdm(range(shadows), desc="shadow rounds", leave=False, disable=None):
        index = np.array(known.federation.index)
        for first, after in itertools.pairwise(offsets):
            index[first:after] = rng.choice(inside, after - first, replace=after - first > len(inside))
        key = jax.random.fold_in(jax.random.fold_in(known.key, 2**31 + number), seed)
        for view, pairs in views(key, index, outside).items():
            lessons[view] += pairs
    real = views(known.key, np.asarray(known.federation.index), others)
    if not all(real.values()) or not all(lessons.values()):
        raise UserError(f"{dataset.name}: the test set has too few samples with the labels of the members")
    return {view: _scores(lessons[view], real[view]) for view in real}


def _outputs(model: Model, samples: Samples) -> Any:
    """A function (K models, K arrays of rows) -> K arrays of logits [R, C]."""

    @jax.jit
    def program(models: Variables, samples: Samples, rows: jax.Array) -> jax.Array:
        return jax.lax.map(lambda each: local.outputs(model, each[0], samples, each[1]), (models, rows))

    def outputs(models: Variables, rows: list[np.ndarray]) -> list[np.ndarray]:
        width = -(-max(max(map(len, rows)), 1) // ROWS) * ROWS
        padded = np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype(np.int32)
        logits = np.asarray(program(models, samples, padded))
        return [values[: len(row)] for values, row in zip(logits, rows, strict=True)]

    return outputs


def _scores(lessons: list[tuple[np.ndarray, ...]], real: list[tuple[np.ndarray, ...]]) -> dict[str, Score]:
    """Learn from the outputs of shadow models, and attack the outputs of the real ones."""
    pooled = [np.concatenate([membership.features(*lesson[part : part + 2]) for lesson in lessons]) for part in (0, 2)]
    learned = membership.Logistic.fit(*pooled)
    attacks = {
        "loss": lambda logits, labels: -membership.losses(logits, labels),
        "shadow models": lambda logits, labels: learned.scores(membership.features(logits, labels)),
    }
    scores = {}
    for name, score in attacks.items():
        pairs = [(score(*sample[:2]), score(*sample[2:])) for sample in real]
        areas = [membership.auc(*pair) for pair in pairs]
        positives = [membership.true_positives(*pair) for pair in pairs]
        counts = np.mean([len(pair[0]) for pair in pairs])
        means = float(np.mean(areas)), _deviation(areas), float(np.mean(positives)), _deviation(positives)
        scores[name] = Score(*means, float(counts))
    return scores


def _deviation(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


# --- Gradient inversion -----------------------------------------------------------------------------------------------


def require_images(victim: Victim, run: runs.RunRecord) -> None:
    """Check that samples are images and that the run has a model to attack.

    Raises:
      UserError: they are not, or it has none.
    """
    (_, federated, _, rounds), _ = victim
    x, advice = federated.dataset.x, "leave the inversion out with --only=membership"
    if np.issubdtype(x.dtype, np.signedinteger):
        raise UserError(f"{run.path}: samples are tokens, not images that could be restored: {advice}")
    if x.ndim != 4 or x.shape[-1] not in (1, 3):
        raise UserError(f"{run.path}: samples of shape {x.shape[1:]} are not images: {advice}")
    if rounds.strategy.global_model is None or rounds.strategy.models is None:
        raise UserError(f"{run.path}: {run.config.strategy} deploys no model of its server: {advice}")


def invert(
    victim: Victim, sizes: Sequence[int], *, steps: int, count: int, start: str, seed: int
) -> tuple[list[Restored], dict[str, np.ndarray]]:
    """Attack ``count`` models per batch size and view. Return the numbers, and images by the name of their row."""
    (config, federated, model, rounds), progress = victim
    facts, dataset = [], federated.dataset
    low, high = (0.0, 255.0) if dataset.x.dtype == np.uint8 else (float(dataset.x.min()), float(dataset.x.max()))
    pixels = inversion.Pixels.of(normalised(dataset, dataset.x[:1], dataset.y[:1]), low, high)
    variables = rounds.deployed(progress) if start == "deployed" else jax.jit(model.init)(random_key(seed))
    params, clients = variables["params"], config.cohort
    choices = {"all": inversion.all_tensors(params), "largest": inversion.largest_tensor(params)}
    pictures: dict[str, np.ndarray] = {}
    # Compiled anew for each batch size.
    gradients_of = jax.jit(
        lambda variables, x, y: jax.lax.map(lambda each: inversion.gradient(model, variables, *each), (x, y))
    )
    for size in sizes:
        rng = np.random.default_rng([seed, size])
        if clients * size > len(dataset.y):
            raise UserError(f"{dataset.name} has too few samples for {clients} victims with {size} samples each")
        rows = rng.permutation(len(dataset.y))[: clients * size].reshape(clients, size)
        decoys = _of_the_same_labels(dataset.y, rows, rng)
        true, other = (np.asarray(pixels.brightness(_inputs(federated, batch))) for batch in (rows, decoys))
        labels = dataset.y[rows].astype(np.int32)
        seen, lr = _one_step(victim, rows, variables)
        gradients = gradients_of(variables, _inputs(federated, rows), jnp.asarray(labels))
        attack = Program(inversion.inverter(model, pixels, steps=steps))
        for view, after in ((UPLOAD, seen.uploads), (NEXT, seen.following)):
            change = _change(seen.sent["params"], after["params"], lr, count)
            for name, weights in choices.items():
                near = np.asarray(_cosines(change, gradients, weights))  # [V, K]
                sources = near.argmax(axis=1)
                images, _ = attack(variables, change, labels[sources], weights, random_key(seed))
                images = np.asarray(images)
                pairs = list(zip(images, sources, strict=True))
                values = [inversion.best_psnr(restored, true[source]) for restored, source in pairs]
                controls = [inversion.best_psnr(restored, other[source]) for restored, source in pairs]
                identified = [inversion.most_similar(restored, true) == source for restored, source in pairs]
                means = [(float(np.mean(series)), _deviation(series)) for series in (values, controls)]
                found = float(np.mean(identified)), float(near.max(axis=1).mean())
                facts.append(Restored(size, view, name, *means[0], *means[1], *found))
                shown = np.concatenate(
                    [true[source][inversion.order(restored, true[source])] for restored, source in pairs]
                )
                row = f"B = {size}, {view}, {name}"
                pictures[f"{row}: source"] = shown[:COLUMNS]
                pictures[f"{row}: restored"] = images.reshape(shown.shape)[:COLUMNS]
    return facts, pictures


def _one_step(victim: Victim, rows: np.ndarray, variables: Variables) -> tuple[Seen, float]:
    """A round of clients that take one step on their ``rows`` [K, B] from ``variables``, and the learning rate."""
    (config, federated, model, _), progress = victim
    flat = rows.reshape(-1)
    dataset = dataclasses.replace(federated.dataset, x=federated.dataset.x[flat], y=federated.dataset.y[flat])
    small = FederatedData.of_sizes(dataset, np.full(len(rows), rows.shape[1]), public=federated.public)
    plain = local.setting(lr=config.lr, momentum=0.0, epochs=1, batch_size=rows.shape[1])
    layout = Layout(devices=1, lanes=1, memory="device", data_placement="device")
    rounds = simulator_of(config, small, model, cohort=len(rows), local=plain, architectures=None, layout=layout).rounds
    views, started = rounds.strategy.models, rounds.init()
    assert views is not None
    models = trees.broadcast(variables, len(rows)) if views.stacked else variables
    started = started._replace(server=views.set(started.server, models), round=progress.round)
    seen = play(rounds, rounds.constants, rounds.place(started))
    return seen, float(config.lr)


def _inputs(federated: FederatedData, rows: np.ndarray) -> jax.Array:
    """The network inputs of training rows [K, B]."""
    dataset = federated.dataset
    flat = normalised(dataset, dataset.x[rows.reshape(-1)], dataset.y[rows.reshape(-1)])
    inputs = gather(flat, jnp.arange(rows.size, dtype=jnp.int32))
    return inputs.reshape(*rows.shape, *inputs.shape[1:])


def _of_the_same_labels(y: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """For each row [K, B] another one with its label (the row itself if there is none)."""
    free = np.setdiff1d(np.arange(len(y)), rows)
    options = {label: rng.permutation(free[y[free] == label]) for label in np.unique(y[rows])}
    used = dict.fromkeys(options, 0)
    decoys = rows.copy()
    for place in np.ndindex(rows.shape):
        label = y[rows[place]]
        if len(options[label]):
            decoys[place] = options[label][used[label] % len(options[label])]
            used[label] += 1
    return decoys


@functools.partial(jax.jit, static_argnums=3)
def _change(before: trees.Params, after: trees.Params, lr: float, count: int) -> trees.Params:
    """The attacker's estimate of the gradients of the first ``count`` models, or of all if there are fewer."""
    before, after = (jax.tree.map(lambda leaf: leaf[:count], models) for models in (before, after))
    return trees.scale(trees.subtract(before, after), 1 / lr)


@jax.jit
def _cosines(change: trees.Params, gradients: trees.Params, weights: trees.Params) -> jax.Array:
    """The cosines [V, K] of V changes with K gradients."""
    one = lambda a: jax.lax.map(lambda b: inversion.cosine(a, b, weights), gradients)
    return jax.lax.map(one, change)


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
