"""pFedHR: the server reassembles the clients' networks from their blocks; each client learns from one of the results.

Wang, Yang, Cui, Che, Lyu, Xu, Ma: Towards Personalized Federated Learning via Heterogeneous Model Reassembly, NeurIPS
2023. After each round the server groups the blocks of the uploaded networks by function, searches for candidates with
blocks of every group, stitches them and fine-tunes them on public data. It matches each client with the candidate whose
logits are most similar to those of (a fine-tuned copy of) the client's network. If the client is selected in the next
round, it learns from its labels and from the outputs of the matched candidate (its teacher): cross-entropy + lambda
KL(teacher || student).

Choices where the paper is not specific: blocks of different widths are grouped around medoids, which need no mean.
`search` describes the number of blocks per group in a candidate (one), `stitches` the stitch between feature maps.
lambda and the server's batch size are those of the code. Without labels, only SimCLR's loss trains the new classifier
of a candidate, as in the code. Its C outputs then do not correspond to classes, so a client distils from outputs
unrelated to its labels.

Deviations from the released code:
* Activations of dense blocks are those of the blocks. The code takes those of the last convolution.
* A client that is not selected in a round keeps its network. In the code it restarts (``paused=restart``).
* Candidates share no tensors.
* The distillation loss is a KL divergence. The code uses raw logits as probabilities (``distillation=raw``).

Compare results with Local-only, which neither the paper nor the code reports: with the first network and 2,880 images
of MNIST for each client it reaches 97.2 % here, where the paper's column has 94.26 %. The authors' clients have less
data: two shards of 225 images, of which 288 images remain after two splits of one fifth
(exp/pfedhr_mnist_shards.flags). The columns ``teacher_accuracy`` and ``teacher_confidence`` show whether clients could
learn from their teachers: the accuracy of the teachers on the samples of their clients, and the mean largest
probability. These are training samples, because strategies do not see test samples. Blocks that a teacher shares with
its client were trained on them before the reassembly.

Simplification of the simulation: the server applies a client's teacher to the client's samples, and the logits are sent
in place of the teacher. The labels are used only for ``teacher_accuracy``. Traffic counts the networks: the client's
network up, the teacher down.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.keys import key_from_data
from fedjax_mr.models import Model, Variables
from fedjax_mr.settings import LARGEST_BATCH, field
from fedjax_mr.strategies.interface import Info, Problem, Strategy
from fedjax_mr.strategies.parts import kept_model, models_sent, nothing, own_start, public_samples
from fedjax_mr.strategies.pfedhr import chains, contrastive, groups, search, similarity, stitches
from fedjax_mr.strategies.pfedhr.chains import Block, Chain, PiecePrograms
from fedjax_mr.strategies.traffic import Parcels, Traffic

PATIENCE = 5  # initial rounds in which teachers may be near chance without a warning


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of pFedHR."""

    public: str = field(
        "labelled",
        "fine-tuning on the public data: with their labels (labelled), or with SimCLR's contrastive loss (unlabelled)",
        choices=("labelled", "unlabelled"),
        source="Wang et al. 2023 describe both",
    )
    distillation_weight: float = field(
        0.1, "lambda, weight of the teacher", low=0, source="the authors' code; not in the paper; pFedClub: 0.2"
    )
    distillation: str = field(
        "kl",
        "distillation loss: KL(teacher || student) (kl), or the cross-entropy of the authors' code with the teacher's "
        "logits as probabilities, which is unbounded below and diverges (raw)",
        choices=("kl", "raw"),
        source="Wang et al. 2023",
    )
    teachers: str = field(
        "previous",
        "clients with a teacher: those of the previous round (previous), or all that ever trained (latest)",
        choices=("previous", "latest"),
        source="Wang et al. 2023",
    )
    paused: str = field(
        "keep",
        "initial network of a client that was not selected in the previous round: its last network (keep), or its "
        "initial one, as in the authors' code (restart). Tests always use the last network",
        choices=("keep", "restart"),
        source="Wang et al. 2023",
    )
    groups: int = field(
        4, "K, number of groups of blocks", low=1, high=1000, source="Wang et al. 2023; the authors' code: 2"
    )
    grouping: str = field(
        "medoids",
        "grouping of blocks: k-medoids of distances (medoids), or the authors' k-means of averaged activations (means)",
        choices=("medoids", "means"),
        source="ours; the paper does not define the centre of blocks with different widths",
    )
    samples: int = field(
        512,
        "public samples on which blocks are compared",
        unit="samples",
        low=2,
        high=LARGEST_BATCH,
        source="ours; the authors' code: all",
    )
    search: str = field(
        "one_per_group",
        "search for candidates: by the paper's rules with a first block and one block per group (one_per_group), by "
        "the rules with every allowed block (rules), or the four random candidates of the authors' code (random)",
        choices=tuple(search.SEARCHES),
        source="Wang et al. 2023, Algorithm 1, without a number of blocks, and Figure 7: five blocks at K = 4",
    )
    max_candidates: int = field(
        8, "maximum number of candidates, a random subset", low=1, high=1000, source="ours; the authors' code has 4"
    )
    stitch: str = field(
        "channel",
        "layers between blocks: mixtures of channels with averages of positions (channel), or dense layers (flat)",
        choices=("channel", "flat"),
        source="ours; the authors' code: flat",
    )
    stitch_limit: int = field(
        20_000_000, "maximum number of parameters in the stitches of a candidate", low=1, source="ours"
    )
    finetune: str = field(
        "all",
        "fine-tuned layers of a candidate: all, or only the stitches",
        choices=("all", "stitches"),
        source="Wang et al. 2023; stitches: pFedClub (Wang et al., NeurIPS 2024)",
    )
    server_epochs: int = field(
        3, "epochs of fine-tuning on the server", unit="epochs", low=0, source="Wang et al. 2023"
    )
    server_lr: float = field(
        1e-3, "learning rate of Adam on the server", low=0, open_low=True, source="the authors' code"
    )
    server_batch: int = field(
        8,
        "batch size of fine-tuning. A larger batch gives fewer steps: with 64 and 1,000 public samples there are 48 "
        "steps, after which teachers are close to chance accuracy",
        unit="samples",
        low=2,
        high=LARGEST_BATCH,
        source="the authors' code",
    )
    temperature: float = field(
        0.5,
        "tau, temperature of the contrastive loss",
        low=0,
        open_low=True,
        source="the authors' code; pFedClub: 0.07",
    )
    average: bool = field(
        False,
        "average the networks of equal architecture in a round before they are decomposed",
        source="Wang et al. 2023, for 100 clients; not in the authors' code",
    )


class State(NamedTuple):
    """The networks of the last round, and the logits of each client's teacher on the client's samples."""

    rows: jax.Array  # [N] row of a client in the last cohort, or -1
    models: Variables  # uploaded networks of the last round [K, ...]
    teaching: jax.Array  # logits of each client's teacher on the client's samples [N, largest client, C]
    teacher_size: jax.Array  # parameters of the teacher [N]; 0 if the client has no teacher


class Account(NamedTuple):
    """A record of one reassembly, for figures: K clients, L blocks, M candidates of at most ``longest`` blocks."""

    clients: np.ndarray  # [K] owners of the networks
    owners: np.ndarray  # [L] client of each block
    places: np.ndarray  # [L] position of each block in the client's network
    kinds: np.ndarray  # [L] 0: convolution, 1: dense
    groups: np.ndarray  # [L]
    similarity: np.ndarray  # [L, L] mean CKA of inputs and outputs
    chains: np.ndarray  # [M, longest] blocks of each candidate in order, padded with -1
    teachers: np.ndarray  # [K] candidate matched with each client, or -1


class Memory(NamedTuple):
    """Memory of one client."""

    model: Variables
    start: jax.Array | None = None  # key of its initial network [2] uint32, with ``paused=restart``


def client_blocks(network: Model, variables: Variables, *, owner: int) -> tuple[Block, ...]:
    """Decompose the network of one client into blocks."""
    number = int(network.architecture(variables))
    return chains.decompose(network.networks[number], jax.device_put(network.unpack(variables, number)), owner=owner)


def averaged(models: Variables, architectures: np.ndarray) -> list[tuple[int, Variables]]:
    """The mean network of each architecture among K stacked models, with the first row of that architecture."""

    def mean(leaf: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return leaf[rows].mean(axis=0) if np.issubdtype(leaf.dtype, np.floating) else leaf[rows[0]]

    rows_of = [np.flatnonzero(architectures == number) for number in sorted(set(architectures.tolist()))]
    return [(int(rows[0]), jax.tree.map(functools.partial(mean, rows=rows), models)) for rows in rows_of]


class Reassembly(NamedTuple):
    """The result of one reassembly."""

    blocks: list[Block]
    groups: np.ndarray  # [L]
    similarity: np.ndarray  # [L, L] mean CKA of inputs and outputs of the blocks
    candidates: list[search.Candidate]
    chains: list[Chain]  # the fine-tuned candidates
    logit_similarity: np.ndarray  # mean cosine of the logits of K clients and M candidates [K, M]
    seconds: dict[str, float]  # by step


def cosines(a: np.ndarray, b: np.ndarray) -> float:
    """The mean cosine of corresponding rows of two arrays of logits [P, C]."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.mean(np.sum(a * b, axis=1) / np.maximum(lengths, 1e-12)))


def accuracy_and_confidence(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The accuracy of logits, and their mean largest probability.

    Args:
      logits: [S, C] for S samples.
      labels: [S] int.
    """
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return float(np.mean(logits.argmax(axis=1) == labels)), float(np.mean(1 / shifted.sum(axis=1)))


class Reassembler:
    """The host code of the server. Its compiled programs are cached over the rounds."""

    def __init__(self, hyper: Hyper, problem: Problem) -> None:
        """Check the problem; programs are compiled later.

        Raises:
          UserError: there are no public data, they have no labels although ``public=labelled`` needs them, or a network
            cannot be decomposed.
        """
        self.public = public_samples(problem, "pfedhr")
        if hyper.public == "labelled" and self.public.y is None:
            raise UserError("the public data have no labels: pass hyper.public=unlabelled")
        for member in problem.model.networks:
            chains.require_blocks(member)
        self.hyper, self.problem = hyper, problem
        self.programs = PiecePrograms(lr=hyper.server_lr)
        self._warned = False

    @functools.cached_property
    def tuning(self) -> dict[str, Any]:
        """The options of fine-tuning: the same objects in every round, because they are keys of compiled programs."""
        hyper = self.hyper
        fixed = {"epochs": hyper.server_epochs, "batch_size": hyper.server_batch}
        if hyper.public == "labelled":
            return {**fixed, "loss": chains.supervised(self.problem.model.task)}
        contrast = lambda logits, labels, mask: contrastive.nt_xent(logits, mask, temperature=hyper.temperature)
        return {
            **fixed,
            "loss": contrast,
            "views": functools.partial(contrastive.view, **_range(self.public.x)),
        }

    def reassemble(self, networks: list[tuple[Block, ...]], sources: list[tuple[Block, ...]], key: Any) -> Reassembly:
        """Group, search, stitch, fine-tune and match; consumes ``key``.

        Args:
          networks: blocks of the K clients' networks.
          sources: blocks from which candidates are built: those of the clients, or of mean networks.
          key: randomness of the candidates, the new stitches and the fine-tuning.
        """
        hyper, programs, public = self.hyper, self.programs, jax.device_put(self.public)
        shape, timer = self.problem.model.input_shape, _StepTimer()
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        chain_of = lambda blocks: tuple(block.piece for block in blocks)

        rows = rng.permutation(len(public.x))[: hyper.samples]
        probe = public._replace(x=public.x[rows], y=None)
        grams, averages = [], []  # for each network: of its input and of the output of each block
        for network in sources:
            activations = programs.activations(chain_of(network), probe)
            grams.append([similarity.gram(each) for each in activations])
            averages.append([groups.averaged(each) for each in activations] if hyper.grouping == "means" else [])
        blocks = [block for network in sources for block in network if block.kind]  # only blocks with tensors
        source_of = [number for number, network in enumerate(sources) for block in network if block.kind]
        side = lambda table, step: [table[i][block.index + step] for i, block in zip(source_of, blocks, strict=True)]
        entering, leaving = (similarity.compare(side(grams, step)) for step in (0, 1))
        timer("activations and CKA")

        if hyper.grouping == "medoids":
            labels = groups.k_medoids(similarity.distances(entering, leaving), hyper.groups)
        else:
            seed = int(rng.integers(2**31))
            labels = groups.averaged_k_means(side(averages, 0), side(averages, 1), hyper.groups, seed=seed)
        timer("grouping")

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
        timer("search and stitching", stitched)

        tune = functools.partial(
            programs.train, samples=public, key=jax.random.fold_in(key, hyper.max_candidates), **self.tuning
        )
        tuned = [tune(chain, stitches_only=hyper.finetune == "stitches") for chain in stitched]
        timer("fine-tuning of the candidates", tuned)
        copies = [tune(chain_of(network)) for network in networks] if tuned else []
        timer("fine-tuning of the clients' copies", copies)
        of_clients, of_candidates = ([programs.logits(chain, public) for chain in each] for each in (copies, tuned))
        table = np.array([[cosines(a, b) for b in of_candidates] for a in of_clients])
        logit_similarity = table.reshape(len(networks), len(tuned))
        timer("matching")
        similarities = (entering + leaving) / 2
        return Reassembly(blocks, labels, similarities, candidates, tuned, logit_similarity, timer.seconds)

    def teach(self, state: State, key: jax.Array, client: Callable[[int], ClientData]) -> tuple[State, Info]:
        """Assign teachers to the clients of the round: -> (state, info); consumes ``key``.

        The simulation computes the logits of the teachers on the clients' samples here; real clients would compute
        them.

        The information is the `Account` and two means over the clients: the accuracy of a client's teacher on the
        client's samples (``teacher_accuracy``) and its largest probability (``teacher_confidence``). They are NaN
        without teachers.
        """
        hyper, problem = self.hyper, self.problem
        rows, models = np.asarray(state.rows), jax.tree.map(np.asarray, state.models)
        clients = np.argsort(rows, kind="stable")[(rows < 0).sum() :]  # in the order of the cohort
        take = lambda row: jax.tree.map(lambda leaf: leaf[row], models)
        networks = [client_blocks(problem.model, take(row), owner=row) for row in range(len(clients))]
        sources = networks
        if hyper.average:
            architectures = np.broadcast_to(problem.model.architecture(models), len(clients))
            means = averaged(models, architectures)
            sources = [client_blocks(problem.model, mean, owner=row) for row, mean in means]
        result = self.reassemble(networks, sources, key)

        teaching, sizes = np.array(state.teaching), np.array(state.teacher_size)
        if hyper.teachers == "previous":
            sizes[:] = 0
        teachers = np.full(len(clients), -1, np.int32)
        scores = []
        samples, largest = jax.device_put(self.public), problem.local.max_size
        for row, number in enumerate(clients if result.chains else []):
            teachers[row] = result.logit_similarity[row].argmax()
            teacher = result.chains[teachers[row]]
            data = client(number)
            size = int(data.size)
            rows = np.asarray(data.index)[int(data.offset) + np.minimum(np.arange(largest), size - 1)]
            own = samples._replace(x=jnp.asarray(data.samples.x[rows]), y=None)
            teaching[number] = self.programs.logits(teacher, own)
            sizes[number] = sum(trees.num_bytes(piece.variables) for piece in teacher) // 4
            if "classes" in problem.model.task.provides:
                labels = np.asarray(data.samples.y[rows[:size]])
                scores.append(accuracy_and_confidence(teaching[number][:size], labels))
        state = state._replace(teaching=jnp.asarray(teaching), teacher_size=jnp.asarray(sizes))
        account = account_of(clients, result, teachers)
        accuracy, confidence = np.mean(scores, axis=0) if scores else (np.nan, np.nan)
        columns = {"teacher_accuracy": float(accuracy), "teacher_confidence": float(confidence)}
        return state, {"candidates": float(len(account.chains)), **columns, **account._asdict()}

    def warn_if_near_chance(self, round: int, accuracy: float) -> None:
        """Log a single warning if the accuracy of labelled teachers is near chance after round 5."""
        chance = 1 / self.problem.num_classes
        near = accuracy < chance + min(chance, 0.1)
        if near and round > PATIENCE and self.hyper.public == "labelled" and not self._warned:
            self._warned = True
            logging.warning(
                "pfedhr: in round %d the teachers have %.1f %% accuracy on their clients' samples (chance: %.1f %%), "
                "so clients cannot learn from them. Use more public data, a smaller hyper.server_batch or more "
                "hyper.server_epochs",
                round,
                100 * accuracy,
                100 * chance,
            )


def account_of(clients: np.ndarray, result: Reassembly, teachers: np.ndarray) -> Account:
    """The account of a reassembly for the clients of the round [K] and their teachers [K]."""
    longest = max(map(len, result.candidates), default=0)
    padded = [[*candidate, *[-1] * (longest - len(candidate))] for candidate in result.candidates]
    integers = lambda values: np.array(values, np.int32)
    return Account(
        clients=integers(clients),
        owners=integers([clients[block.owner] for block in result.blocks]),
        places=integers([block.index for block in result.blocks]),
        kinds=integers([block.kind == "fc" for block in result.blocks]),
        groups=integers(result.groups),
        similarity=np.asarray(result.similarity, np.float32),
        chains=integers(padded).reshape(len(padded), longest),
        teachers=teachers,
    )


class _StepTimer:
    """Seconds of each step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, step: str, results: Sequence[Chain] = ()) -> None:
        """Wait for the results, and record the seconds since the last call."""
        jax.block_until_ready([piece.variables for chain in results for piece in chain])
        now = time.perf_counter()
        self.seconds[step], self._last = now - self._last, now


def _range(x: Any) -> dict[str, float]:
    """The smallest and the largest possible raw value of a pixel."""
    if x.dtype == np.uint8:
        return {"low": 0.0, "high": 255.0}
    return {"low": float(np.min(x)), "high": float(np.max(x))}


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build pFedHR.

    Raises:
      UserError: the task has an output for each pixel or token; or as `Reassembler`.
    """
    if len(problem.model.task.outputs(problem.model.input_shape)) > 1:
        raise UserError(f"pfedhr needs one output per sample, but the task is {problem.model.task.name}")
    network, reassembler = problem.model, Reassembler(hyper, problem)
    largest, count = problem.local.max_size, problem.cohort_size

    def init(key):
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), tree)
        return State(
            rows=jnp.full(problem.num_clients, -1, jnp.int32),
            models=zeros(jax.eval_shape(network.init, key)),
            teaching=jnp.zeros((problem.num_clients, largest, problem.num_classes)),
            teacher_size=jnp.zeros(problem.num_clients, jnp.int32),
        )

    def init_memory(key, client_id):
        start = own_start(problem, key, client_id)
        if hyper.paused == "keep":
            return Memory(start)
        return Memory(start, jax.random.key_data(jax.random.fold_in(key, client_id)))  # the key of `own_start`

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

            def losses(batch):
                supervised = network.task.objective(logits, batch.y, batch.mask)
                teacher = payload["teaching"][batch.position]
                if hyper.distillation == "kl" or "logits" not in network.task.provides:
                    distilled = network.task.divergence(logits, teacher)
                else:
                    distilled = -jnp.sum(teacher * jax.nn.log_softmax(logits), axis=-1)
                return supervised + weight * distilled

            return local.masked_mean(local.mixed(batch, losses), batch.mask), state

        start = memory.model
        if hyper.paused == "restart":
            first = network.init(key_from_data(memory.start), network.architecture(memory.model))
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
        state, info = reassembler.teach(state, key, client)
        reassembler.warn_if_near_chance(round, info["teacher_accuracy"])
        return state, info

    def traffic(usual, state, uploads, cohort, round):
        """Down: the parameters of the teachers. Up: the networks of the clients."""
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
        personal_model=kept_model,
    )
