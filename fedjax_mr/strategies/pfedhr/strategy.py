"""pFedHR: the server takes the clients' networks apart and reassembles them; each client learns from one result.

Wang, Yang, Cui, Che, Lyu, Xu, Ma: Towards Personalized Federated Learning via Heterogeneous Model Reassembly, NeurIPS
2023. After each round the server groups the blocks of the uploaded networks by function, searches candidates that use
every group, stitches and fine-tunes them on public data, and matches every client with the candidate whose logits are
most like those of (a fine-tuned copy of) its own network. If the client is drawn in the next round, it learns its own
labels and the matched candidate's outputs: cross-entropy + lambda KL(teacher || student).

What the paper leaves open: distances between blocks of different widths are grouped around medoids, which need no mean;
how many blocks of a group a candidate takes (`search`: one, and why); what a stitch between feature maps is
(`stitches`); lambda and the server's batch are those of the code. Without labels nothing but SimCLR's loss trains a
candidate's new classifier (so in the code), so its C outputs stand for no classes and a client distils from numbers
that have nothing to do with its labels.

Deviations from the released code, apart from those: activations of dense blocks are their own (the code's are those of
the last convolution); a client that pauses keeps its network (the code's starts anew: ``paused=restart``); candidates
share no tensors; the distillation is a KL (the code's takes raw logits for probabilities: ``distillation=raw``).

Read a result beside Local-only, which neither the paper nor the code prints: with all clients on the first network and
2,880 images of MNIST each it has 97.2 % here, where the paper's column has 94.26. The authors' clients hold less: two
shards of 225 images of which two cuts of a fifth leave 288 (exp/pfedhr_mnist_shards.flags). And see whether there was
anything to learn: ``teacher_accuracy`` and ``teacher_confidence`` tell how often the teachers made in a round are right
on their pupils' samples, and how sure they are (the mean largest probability). Strategies know no test samples, so
these are the pupils' training samples, those that the teachers are asked about; blocks that a teacher has of its own
pupil were trained on them before they were stitched.

The simulation takes a short cut: the server applies a client's teacher to the client's own samples, which the upload
holds for this purpose, with their labels for ``teacher_accuracy`` alone, and the logits travel in place of the teacher.
Traffic counts the networks: up the client's, down the teacher's.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, Variables
from fedjax_mr.strategies.base import Info, Parcels, Problem, Strategy, Traffic, models_sent, nothing, own_starts
from fedjax_mr.strategies.hyper import LARGEST_BATCH, field
from fedjax_mr.strategies.pfedhr import chains, contrastive, groups, search, similarity, stitches
from fedjax_mr.strategies.pfedhr.chains import Block, Chain, Programs

PATIENCE = 5  # rounds in which teachers may be near chance: the clients' networks are young


@dataclasses.dataclass(frozen=True)
class Hyper:
    """pFedHR's own settings."""

    public: str = field(
        "labelled",
        "fine-tuning on the public data: by their labels, or by SimCLR's contrastive loss without",
        choices=("labelled", "unlabelled"),
        source="Wang et al. 2023 have both",
    )
    distillation_weight: float = field(
        0.1, "lambda, the weight of the teacher", low=0, source="the authors' code; not in the paper; pFedClub: 0.2"
    )
    distillation: str = field(
        "kl",
        "kl: KL(teacher || student); raw: the authors' cross-entropy with the teacher's logits as if probabilities, "
        "which has no lower bound and diverges",
        choices=("kl", "raw"),
        source="Wang et al. 2023",
    )
    teachers: str = field(
        "previous",
        "who has a teacher: clients of the previous round, or all that ever took part (their latest)",
        choices=("previous", "latest"),
        source="Wang et al. 2023",
    )
    paused: str = field(
        "keep",
        "how a client starts that took no part in the round before: with its own network of last time, or (restart) "
        "with the one that it had at first, as in the authors' code; tested is always the last one",
        choices=("keep", "restart"),
        source="Wang et al. 2023",
    )
    groups: int = field(
        4, "K, the number of groups of blocks", low=1, high=1000, source="Wang et al. 2023; the authors' code: 2"
    )
    grouping: str = field(
        "medoids",
        "around medoids of the distances, or by the authors' k-means of averaged activations",
        choices=("medoids", "means"),
        source="ours; the paper does not say what the centre of blocks of different widths is",
    )
    samples: int = field(
        512,
        "public samples that blocks are compared on",
        unit="samples",
        low=2,
        high=LARGEST_BATCH,
        source="ours; the authors' code: all",
    )
    search: str = field(
        "one_per_group",
        "candidates by the paper's rules, with a first block and one of each group (one_per_group) or with every block "
        "that the rules allow (rules); or the authors' four random ones (random)",
        choices=tuple(search.SEARCHES),
        source="Wang et al. 2023, Algorithm 1, which leaves the number open, and Figure 7: five blocks at K = 4",
    )
    max_candidates: int = field(
        8, "candidates kept of those found, a random choice", low=1, high=1000, source="ours; the authors' code has 4"
    )
    stitch: str = field(
        "channel",
        "what joins blocks: mixtures of channels and averages of places, or dense layers between everything",
        choices=("channel", "flat"),
        source="ours; the authors' code: flat",
    )
    stitch_limit: int = field(
        20_000_000, "the largest number of parameters in the stitches of a candidate", low=1, source="ours"
    )
    finetune: str = field(
        "all",
        "what of a candidate is fine-tuned",
        choices=("all", "stitches"),
        source="Wang et al. 2023; stitches: pFedClub (Wang et al., NeurIPS 2024)",
    )
    server_epochs: int = field(3, "epochs of fine-tuning", unit="epochs", low=0, source="Wang et al. 2023")
    server_lr: float = field(
        1e-3, "Adam's learning rate on the server", low=0, open_low=True, source="the authors' code"
    )
    server_batch: int = field(
        8,
        "batch of fine-tuning; a larger one makes fewer steps: 64 with 1,000 public samples makes 48, after which the "
        "teachers hardly know more than chance",
        unit="samples",
        low=2,
        high=LARGEST_BATCH,
        source="the authors' code",
    )
    temperature: float = field(
        0.5, "tau of the contrastive loss", low=0, open_low=True, source="the authors' code; pFedClub: 0.07"
    )
    average: bool = field(
        False,
        "average the round's networks of equal architecture before they are taken apart",
        source="Wang et al. 2023, for 100 clients; not in the authors' code",
    )


class State(NamedTuple):
    """The networks of the last round, and what each client's teacher says of the client's own samples."""

    rows: jax.Array  # [N] at which row of the round a client stood; -1: it took no part
    models: Variables  # what the round's clients uploaded [K, ...]
    teaching: jax.Array  # the logits of each client's teacher for the client's own samples [N, largest client, C]
    teacher_size: jax.Array  # numbers in the teacher that this stands for [N]; 0: the client has no teacher


class Account(NamedTuple):
    """One reassembly, for pictures: K clients, L blocks, M candidates of at most ``longest`` blocks."""

    clients: np.ndarray  # [K] whose networks they were
    owners: np.ndarray  # [L] the client of each block
    places: np.ndarray  # [L] its place in the client's network
    kinds: np.ndarray  # [L] 0: convolution, 1: dense
    groups: np.ndarray  # [L]
    similarity: np.ndarray  # [L, L] mean CKA of what enters and what leaves
    chains: np.ndarray  # [M, longest] the blocks of each candidate, in order; -1 fills up
    teachers: np.ndarray  # [K] the candidate that was matched with each client; -1: there was none


class Memory(NamedTuple):
    """A client's memory."""

    model: Variables
    start: jax.Array | None = None  # with ``paused=restart`` the key of its first network [2] uint32


def taken_apart(network: Model, variables: Variables, *, owner: int) -> tuple[Block, ...]:
    """The blocks of one client's network."""
    number = int(network.architecture(variables))
    return chains.take_apart(network.networks[number], jax.device_put(network.unpack(variables, number)), owner=owner)


def averaged(models: Variables, architectures: np.ndarray) -> list[tuple[int, Variables]]:
    """The mean network of each architecture, with the first row of the K stacked models that is of it."""

    def mean(leaf: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return leaf[rows].mean(axis=0) if np.issubdtype(leaf.dtype, np.floating) else leaf[rows[0]]

    rows_of = [np.flatnonzero(architectures == number) for number in sorted(set(architectures.tolist()))]
    return [(int(rows[0]), jax.tree.map(functools.partial(mean, rows=rows), models)) for rows in rows_of]


class Reassembled(NamedTuple):
    """The result of one reassembly."""

    blocks: list[Block]
    groups: np.ndarray  # [L]
    similarity: np.ndarray  # [L, L] mean CKA of what enters and what leaves the blocks
    candidates: list[search.Candidate]
    chains: list[Chain]  # the candidates, fine-tuned
    logit_similarity: np.ndarray  # mean cosine of the logits of K clients and M candidates [K, M]
    seconds: dict[str, float]  # by step


def cosines(a: np.ndarray, b: np.ndarray) -> float:
    """The mean cosine of the rows of two tables of logits [P, C]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean(np.sum(a * b, axis=1) / np.maximum(lengths, 1e-12)))


def lesson(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The share of samples whose largest logit is their label's, and the mean largest probability.

    Args:
      logits: [S, C] for S samples.
      labels: [S] int.
    """
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return float(np.mean(logits.argmax(axis=1) == labels)), float(np.mean(1 / shifted.sum(axis=1)))


class Server:
    """The host's part: reassembly with programs that are kept over the rounds."""

    def __init__(self, hyper: Hyper, problem: Problem) -> None:
        """Compile nothing yet.

        Raises:
          UserError: there is no public set, or it has no labels and is to have.
        """
        if problem.public is None:
            raise UserError("pfedhr fine-tunes on public data: give --public_share")
        if hyper.public == "labelled" and problem.public.y is None:
            raise UserError("the public data have no labels: give --pfedhr_public=unlabelled")
        for member in problem.model.networks:
            chains.require_blocks(member)
        self.hyper, self.problem, self.public = hyper, problem, problem.public
        self.programs = Programs(lr=hyper.server_lr)
        self._warned = False

    @functools.cached_property
    def tuning(self) -> dict[str, Any]:
        """The options of fine-tuning; the same objects in every round, because programs are kept by them."""
        hyper = self.hyper
        fixed = {"epochs": hyper.server_epochs, "batch_size": hyper.server_batch}
        if hyper.public == "labelled":
            return {**fixed, "loss": chains.cross_entropy}
        contrast = lambda logits, labels, mask: contrastive.nt_xent(logits, mask, temperature=hyper.temperature)
        return {
            **fixed,
            "loss": contrast,
            "views": functools.partial(contrastive.view, **_range(self.public.x)),
        }

    def reassemble(self, networks: list[tuple[Block, ...]], sources: list[tuple[Block, ...]], key: Any) -> Reassembled:
        """Group, search, stitch, fine-tune and match; consumes ``key``.

        Args:
          networks: the K clients' networks as blocks.
          sources: those that blocks are taken from (the clients', or means of them).
          key: of the choice among candidates, of new stitches and of fine-tuning.
        """
        hyper, programs, public = self.hyper, self.programs, jax.device_put(self.public)
        shape, clock = self.problem.model.input_shape, _Clock()
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        chain_of = lambda blocks: tuple(block.piece for block in blocks)

        rows = rng.permutation(len(public.x))[: hyper.samples]
        seen = public._replace(x=public.x[rows], y=None)
        grams, averages = [], []  # of the input and of what leaves each block, network by network
        for own in sources:
            passed = programs.activations(chain_of(own), seen)
            grams.append([similarity.gram(each) for each in passed])
            averages.append([groups.averaged(each) for each in passed] if hyper.grouping == "means" else [])
        blocks = [block for own in sources for block in own if block.kind]  # without tensors there is no function
        of = [number for number, own in enumerate(sources) for block in own if block.kind]
        side = lambda table, step: [table[i][block.index + step] for i, block in zip(of, blocks, strict=True)]
        entering, leaving = (similarity.compare(side(grams, step)) for step in (0, 1))
        clock("activations and CKA")

        if hyper.grouping == "medoids":
            labels = groups.k_medoids(similarity.distances(entering, leaving), hyper.groups)
        else:
            seed = int(rng.integers(2**31))
            labels = groups.averaged_k_means(side(averages, 0), side(averages, 1), hyper.groups, seed=seed)
        clock("grouping")

        candidates = search.SEARCHES[hyper.search](blocks, labels, most=hyper.max_candidates, rng=rng)
        stitched = [
            stitches.stitch(
                [blocks[i] for i in candidate],
                input_shape=shape,
                num_classes=self.problem.num_classes,
                kind=hyper.stitch,
                limit=hyper.stitch_limit,
                programs=programs,
                key=jax.random.fold_in(key, number),
            )
            for number, candidate in enumerate(candidates)
        ]
        clock("search and stitching", stitched)

        tune = functools.partial(
            programs.train, samples=public, key=jax.random.fold_in(key, hyper.max_candidates), **self.tuning
        )
        tuned = [tune(chain, stitches_only=hyper.finetune == "stitches") for chain in stitched]
        clock("fine-tuning of the candidates", tuned)
        copies = [tune(chain_of(own)) for own in networks] if tuned else []
        clock("fine-tuning of the clients' copies", copies)
        theirs, ours = ([programs.logits(chain, public) for chain in each] for each in (copies, tuned))
        logit_similarity = np.array([[cosines(a, b) for b in ours] for a in theirs]).reshape(len(networks), len(tuned))
        clock("matching")
        similarities = (entering + leaving) / 2
        return Reassembled(blocks, labels, similarities, candidates, tuned, logit_similarity, clock.seconds)

    def teach(self, state: State, key: jax.Array, client: Callable[[int], ClientData]) -> tuple[State, Info]:
        """The state with the teachers of the round's clients, and an account of it; consumes ``key``.

        The simulation computes here what a teacher says of a client's own samples; a real client would do so itself.

        Beside the account stand means over the clients: how many of its own samples a client's teacher gets right
        (``teacher_accuracy``), and the largest probability that it gives (``teacher_confidence``); NaN without one.
        """
        hyper, problem = self.hyper, self.problem
        rows, models = np.asarray(state.rows), jax.tree.map(np.asarray, state.models)
        clients = np.argsort(rows, kind="stable")[(rows < 0).sum() :]  # in the round's order
        take = lambda row: jax.tree.map(lambda leaf: leaf[row], models)
        networks = [taken_apart(problem.model, take(row), owner=row) for row in range(len(clients))]
        sources = networks
        if hyper.average:
            architectures = np.broadcast_to(problem.model.architecture(models), len(clients))
            means = averaged(models, architectures)
            sources = [taken_apart(problem.model, mean, owner=row) for row, mean in means]
        made = self.reassemble(networks, sources, key)

        teaching, sizes = np.array(state.teaching), np.array(state.teacher_size)
        if hyper.teachers == "previous":
            sizes[:] = 0
        teachers = np.full(len(clients), -1, np.int32)
        lessons = []
        samples, largest = jax.device_put(self.public), problem.local.max_size
        for row, number in enumerate(clients if made.chains else []):
            teachers[row] = made.logit_similarity[row].argmax()
            teacher = made.chains[teachers[row]]
            data = client(number)
            size = int(data.size)
            rows = np.asarray(data.index)[int(data.offset) + np.minimum(np.arange(largest), size - 1)]
            own = samples._replace(x=jnp.asarray(data.samples.x[rows]), y=None)
            teaching[number] = self.programs.logits(teacher, own)
            sizes[number] = sum(trees.num_bytes(piece.variables) for piece in teacher) // 4
            lessons.append(lesson(teaching[number][:size], np.asarray(data.samples.y[rows[:size]])))
        state = state._replace(teaching=jnp.asarray(teaching), teacher_size=jnp.asarray(sizes))
        account = account_of(clients, made, teachers)
        accuracy, confidence = np.mean(lessons, axis=0) if lessons else (np.nan, np.nan)
        columns = {"teacher_accuracy": float(accuracy), "teacher_confidence": float(confidence)}
        return state, {"candidates": float(len(account.chains)), **columns, **account._asdict()}

    def warn_of_ignorance(self, round: int, accuracy: float) -> None:
        """Log once, after round 5, that labelled teachers of this ``accuracy`` know hardly more than chance."""
        chance = 1 / self.problem.num_classes
        near = accuracy < chance + min(chance, 0.1)
        if near and round > PATIENCE and self.hyper.public == "labelled" and not self._warned:
            self._warned = True
            logging.warning(
                "pfedhr: in round %d the teachers are right on %.1f %% of their pupils' samples (chance: %.1f %%), so "
                "nothing can be learnt from them. More public data, a smaller --pfedhr_server_batch or more "
                "--pfedhr_server_epochs train them longer",
                round,
                100 * accuracy,
                100 * chance,
            )


def account_of(clients: np.ndarray, made: Reassembled, teachers: np.ndarray) -> Account:
    """The account of a reassembly for the round's clients [K] and the candidates that teach them [K]."""
    longest = max(map(len, made.candidates), default=0)
    filled = [[*candidate, *[-1] * (longest - len(candidate))] for candidate in made.candidates]
    integers = lambda values: np.array(values, np.int32)
    return Account(
        clients=integers(clients),
        owners=integers([clients[block.owner] for block in made.blocks]),
        places=integers([block.index for block in made.blocks]),
        kinds=integers([block.kind == "fc" for block in made.blocks]),
        groups=integers(made.groups),
        similarity=np.asarray(made.similarity, np.float32),
        chains=integers(filled).reshape(len(filled), longest),
        teachers=teachers,
    )


class _Clock:
    """Seconds since the last call, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, step: str, made: Sequence[Chain] = ()) -> None:
        """Wait until some chains are made, and note the time."""
        jax.block_until_ready([piece.variables for chain in made for piece in chain])
        now = time.perf_counter()
        self.seconds[step], self._last = now - self._last, now


def _range(x: Any) -> dict[str, float]:
    """The smallest and the largest raw value that a pixel may have."""
    if x.dtype == np.uint8:
        return {"low": 0.0, "high": 255.0}
    return {"low": float(np.min(x)), "high": float(np.max(x))}


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build pFedHR."""
    network, server = problem.model, Server(hyper, problem)
    largest, count = problem.local.max_size, problem.cohort_size

    def init(key):
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), tree)
        return State(
            rows=jnp.full(problem.num_clients, -1, jnp.int32),
            models=zeros(jax.eval_shape(network.init, key)),
            teaching=jnp.zeros((problem.num_clients, largest, problem.num_classes)),
            teacher_size=jnp.zeros(problem.num_clients, jnp.int32),
        )

    def init_memory(key):
        starts = own_starts(problem, key)
        if hyper.paused == "keep":
            return Memory(starts)
        return Memory(starts, jax.random.key_data(jax.random.split(key, problem.num_clients)))  # as `own_starts` draws

    def dispatch(state, cohort, key):
        return {
            "teaching": state.teaching[cohort.ids],
            "taught": state.teacher_size[cohort.ids] > 0,
            "paused": state.rows[cohort.ids] < 0,
        }

    def client_update(payload, memory, data, round, key):
        weight = jnp.where(payload["taught"], hyper.distillation_weight, 0.0)

        def loss(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            supervised = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
            teacher = payload["teaching"][batch.position]
            student = jax.nn.log_softmax(logits)
            if hyper.distillation == "kl":
                learned = optax.losses.kl_divergence_with_log_targets(student, jax.nn.log_softmax(teacher))
            else:
                learned = -jnp.sum(teacher * student, axis=-1)
            return local.masked_mean(supervised + weight * learned, batch.mask), state

        start = memory.model
        if hyper.paused == "restart":
            first = network.init(jax.random.wrap_key_data(memory.start), network.architecture(memory.model))
            start = trees.where(payload["paused"], first, start)
        model, metrics = local.train(network, problem.local, start, data, key, loss=loss)
        return {"model": model}, memory._replace(model=model), metrics

    def server_update(state, uploads, cohort, round, key):
        new = state._replace(
            rows=jnp.full_like(state.rows, -1).at[cohort.ids].set(jnp.arange(count, dtype=jnp.int32)),
            models=uploads["model"],
        )
        return new, {"taught": jnp.sum((state.teacher_size[cohort.ids] > 0).astype(jnp.float32))}

    def between_rounds(state, round, key, client):
        state, info = server.teach(state, key, client)
        server.warn_of_ignorance(round, info["teacher_accuracy"])
        return state, info

    def traffic(usual, state, uploads, cohort, round):
        """Down the teachers, number by number, up the clients' networks."""
        return Traffic(
            down=(Parcels.of(jnp.sum(state.teacher_size[cohort.ids]), 4),), up=models_sent(problem, uploads["model"])
        )

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        init_memory=init_memory,
        between_rounds=between_rounds,
        traffic=traffic,
        personal_part=nothing,
        personal_model=lambda part, memory, data, key: memory.model,
    )
