"""The simulator: a federation of N clients as a Python object, without flags or files.

    federated = fmr.data.federate(fmr.data.load("digits"), num_clients=20, partition="dirichlet", alpha=0.5)
    simulator = fmr.Simulator("fedmr", "cnn_digits", federated, cohort=5)
    state, report = simulator.run(simulator.init(), 20)
    print(simulator.test(state).accuracy)

`fmr.run` adds a run folder with checkpoints, metrics and figures.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import models, trees
from fedjax_mr.client import local as local_training
from fedjax_mr.client.local import LocalSetting
from fedjax_mr.client.optimizers import OPTIMIZERS
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.data.federated import Dataset, FederatedData
from fedjax_mr.data.inputs import scale_and_shift
from fedjax_mr.engine.clients import ClientAxis, client_axis, first_device
from fedjax_mr.engine.devices import refuse_settings, set_up_jax
from fedjax_mr.engine.evaluation import Evaluation, Tested, backdoor_test
from fedjax_mr.engine.layout import Layout, data_on_host, lanes_that_fit, memory_limit, memory_on_host
from fedjax_mr.engine.personal import Clients, PersonalEvaluation, RemoteClients, TestsOfClients
from fedjax_mr.engine.program import is_of_this_package, memory_needed
from fedjax_mr.engine.round import (
    INIT,
    Build,
    Federation,
    Progress,
    Report,
    RunConstants,
)
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.trials import OneTrial
from fedjax_mr.errors import DivergedError, UserError, unknown_name
from fedjax_mr.keys import random_key
from fedjax_mr.models import BlockNet, Model, Variables, Zoo, parts
from fedjax_mr.models.base import with_fields
from fedjax_mr.registry import names_only_ours
from fedjax_mr.settings import LARGEST_INT32, bind, check
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.tasks import Criterion, Metric, Task, with_metrics
from fedjax_mr.tasks.losses import LOSSES, with_loss


class Simulator:
    """Federated training on this machine. All clients of a round train in one compiled program.

    Attributes:
      federated: the data of the clients.
      model: the network, or a `Zoo` of several.
      problem: the facts of the federation that the strategy may use.
      code: equal for simulators that may share compiled programs. None if strategy and networks are of this package.
        Other code may depend on more than its arguments, such as a variable of a notebook, so it is traced again.
      rounds: the compiled rounds.
    """

    def __init__(
        self,
        strategy: str | Callable[[Any, Problem], Strategy],
        model: Any,
        federated: FederatedData,
        *,
        cohort: int,
        local: LocalSetting | None = None,
        hyper: Any = None,
        seed: int = 0,
        task: Task | None = None,
        loss: str | Criterion | None = None,
        metrics: Sequence[str | Metric] = (),
        trainable: parts.Trainable | None = None,
        variables: Any = None,
        architectures: Sequence[int] | np.ndarray | None = None,
        layout: Layout | ClientAxis | None = None,
        stop_at_divergence: bool = True,
        remote: RemoteClients | None = None,
        name: str = "",
    ) -> None:
        """Place the data. Each program is compiled at its first use.

        Args:
          strategy: a name in `STRATEGIES`, or a function ``build(hyper, problem)`` that returns a `Strategy`.
          model: a name in `MODELS`, a Flax module or a `Model`. If clients have different networks, a list of them.
          federated: the clients' data, from `data.federate`.
          cohort: K, clients per round.
          local: the settings of the clients' training. Default: `local.setting()`.
          hyper: the strategy's hyper-parameters, passed to ``build``. Default, if it is registered: its
            dataclass of defaults.
          seed: seed of all random numbers during training. The division of the data has its own seed.
          task: what is learned. Default: the task of the dataset.
          loss: the loss in training: a name of `LOSSES`, or a function (outputs [B, ...], targets [B, ...], mask [B])
            -> [B]. The method adds its own terms to it. Default: that of the task.
          metrics: the numbers of a test, by name or as objects. The first one is that by which models are judged.
            Default: those of the task.
          trainable: what trains: patterns of the paths of variables, such as ``classifier/*``, or a predicate of the
            path. All other variables are frozen. Default: all train.
          variables: values of all variables of the network. Default: initialised from the seed.
          architectures: for each client, the number of its initial network in ``model`` [N]. Default: blocks of
            neighbouring clients.
          layout: the devices, and what stays on the host; or the client axis of a machine that need not be present.
          stop_at_divergence: whether a call ends after the first round with a non-finite loss or weight.
          remote: clients that train outside of this process, for example on their own machines.
          name: name of the strategy in messages. Default: its registered name, or the module of its function.

        Raises:
          UserError: unknown name, data that are not divided, a function with other arguments, a network that does not
            fit the samples, K > N, ``architectures`` that do not fit, a layout out of range, more devices than
            available, or as `set_up_jax`.
        """
        refuse_settings()
        if not isinstance(federated, FederatedData):
            raise UserError(
                f"a Simulator needs the clients' data, not {type(federated).__name__}: divide a dataset with "
                "data.federate()"
            )
        _check_cohort(cohort, federated.num_clients)
        _require_whole("seed", seed, 0, LARGEST_INT32)
        given = layout if isinstance(layout, ClientAxis) else None
        layout = Layout() if layout is None or given is not None else layout
        if not isinstance(layout, Layout):
            raise UserError(f"layout= is an fmr.Layout, not a {type(layout).__name__}")
        check(layout, "layout.")
        if remote is None and given is None and not jax.distributed.is_initialized():
            # Before anything else here starts JAX. Several processes are set up before they join.
            set_up_jax(devices=layout.devices, cohort_size=cohort)
        self.federated = federated
        self.model = network_of(model, federated.dataset, task=task_of(federated, task, loss, metrics))
        if trainable is not None or variables is not None:
            start = jax.random.fold_in(random_key(seed), INIT)
            self.model = parts.partly(self.model, trainable or "*", variables=variables, key=start)
        build = _builder(strategy, hyper)
        if isinstance(strategy, str):
            require_task(strategy, self.model.task)
        if isinstance(strategy, str) and len(self.model.networks) > 1 and not STRATEGIES[strategy].several:
            raise UserError(f"{strategy} needs the same network for all clients, but there are {self.model.name}")
        self._name = name or (strategy if isinstance(strategy, str) else strategy.__module__.rpartition(".")[2])
        self._stop_at_divergence, self._remote = stop_at_divergence, remote
        if remote is not None:
            given = first_device()
        axis = given or client_axis(devices=layout.devices, lanes=layout.lanes, cohort_size=cohort)
        self._data_on_host = data_on_host(layout, federated.dataset.x.nbytes, axis)
        self.problem = problem_of(
            self.model,
            local or local_training.setting(),
            federated,
            cohort=cohort,
            architectures=architectures,
            samples_on_device=remote is None and not self._data_on_host,
        )
        split = federated.train_and_validation()
        federation = Federation(
            normalised(federated.dataset, federated.dataset.x, federated.dataset.y), split.index, split.offsets
        )
        self.code = self._code_of(strategy, hyper)
        self._constants = RunConstants(build, self.problem, federation, random_key(seed))
        # Whether a user's network or a channel suits the strategy is known only from a trace of the round.
        ours = all(isinstance(network.module, BlockNet) for network in self.model.networks)
        uncertain = remote is None and (not ours or self._constants.strategy.receive is not None)
        try:
            self._memory_on_host = self._needs_host_memory(layout, axis)
            self.axis = self._with_lanes_that_fit(axis) if given is None and layout.lanes is None else axis
            self.rounds = self._rounds(self.axis)
            if uncertain:
                self.rounds.trace()
        except UserError as error:
            if not uncertain:
                raise
            raise UserError(f"{self._name}: {error}") from None

    # --- training and tests

    def init(self) -> Progress:
        """The state before the first round."""
        refuse_settings()
        return self.rounds.init()

    def run(self, state: Progress, rounds: int = 1) -> tuple[Progress, Report]:
        """Run some rounds.

        Any division of the rounds into calls gives the same numbers.

        Args:
          state: from `init` or an earlier call. It is consumed; continue with the returned state.
          rounds: number of rounds.

        Returns:
          The new state, and the report of the call on the host.

        Raises:
          DivergedError: a loss or weight is not finite, and ``stop_at_divergence`` is set.
          UserError: the state was consumed by an earlier call or is no state, or ``rounds`` is no number above 0.
        """
        _require_whole("rounds", rounds, 1)
        _refuse_consumed(state)
        state, report = self.rounds.run(state, rounds)
        report = jax.device_get(report)
        if self._stop_at_divergence and report.bad_client >= 0:
            raise DivergedError(
                f"round {int(state.round)} diverged: client {int(report.bad_client)} met a loss or weight that is not "
                f"finite at its local step {int(report.bad_step)} (a smaller lr or a clip_norm may help)"
            )
        return state, report

    def test(self, state: Progress) -> Tested:
        """Test the deployed model on the global test set: the metrics of the task, such as ``accuracy``, and the loss.

        Raises:
          UserError: the strategy deploys no model.
        """
        return self.evaluation.one(self.deployed(state))

    def attacked(self, state: Progress, target: int = 0) -> Tested:
        """Test a backdoor in the deployed model: accuracy is the share of images that the trigger moves to ``target``.

        Args:
          state: from `init` or `run`.
          target: the label that attackers want (`channel.attacks.attack`).

        Raises:
          UserError: the strategy deploys no model; or as `backdoor_test`.
        """
        return self.backdoor_evaluation(target).one(self.deployed(state))

    def personal(self, state: Progress, *, finetune_epochs: int = 0) -> Clients:
        """Test each client's personal model, or the deployed model if there are none, on the client's test samples [N].

        Args:
          state: from `init` or `run`.
          finetune_epochs: epochs in which each client first fine-tunes a copy on its training samples.

        Raises:
          UserError: no client has test samples.
        """
        _refuse_consumed(state)
        _require_whole("finetune_epochs", finetune_epochs, 0)
        tests = self.tests_of_clients
        return tests.finetuned(state, finetune_epochs) if finetune_epochs else tests.test(state)

    def deployed(self, state: Progress) -> Variables:
        """The variables of the deployed model.

        Raises:
          UserError: the strategy deploys no model.
        """
        _refuse_consumed(state)
        variables = self.rounds.deployed(state)
        if variables is None:
            raise UserError(f"{self._name} deploys no model; personal(state) tests the personal models of the clients")
        return variables

    def client(self, client_id: int) -> ClientData:
        """The data of one client.

        Raises:
          UserError: there is no such client.
        """
        _require_whole("client_id", client_id, 0, self.problem.num_clients - 1)
        return self.rounds.constants.client(client_id)

    @functools.cached_property
    def evaluation(self) -> Evaluation:
        """The compiled test on the global test set."""
        model = self.rounds.constants.problem.model  # on the devices
        return Evaluation(model, self._test_samples(), self.axis, code=self.code)

    def backdoor_evaluation(self, target: int = 0) -> Evaluation:
        """The compiled test of `attacked`."""
        if target not in self._backdoors:
            samples, counted = backdoor_test(self._test_samples(), target)
            model = self.rounds.constants.problem.model
            self._backdoors[target] = Evaluation(model, samples, self.axis, counted=counted, code=self.code)
        return self._backdoors[target]

    @functools.cached_property
    def _backdoors(self) -> dict[int, Evaluation]:
        return {}

    def _test_samples(self) -> Samples:
        dataset = self.federated.dataset
        return normalised(dataset, dataset.test_x, dataset.test_y)

    @functools.cached_property
    def tests_of_clients(self) -> TestsOfClients:
        """The compiled tests of the clients' models on the clients' test samples."""
        if self._remote is not None:
            return self._remote
        test = self.federated.client_test
        return PersonalEvaluation(self.rounds, self.federated, normalised(self.federated.dataset, test.x, test.y))

    @functools.cached_property
    def validation_of_clients(self) -> TestsOfClients:
        """The compiled tests of the clients' models on their validation samples only."""
        return self._remote or PersonalEvaluation(self.rounds, self.federated, None)

    # --- the layout

    def _with_lanes_that_fit(self, axis: ClientAxis) -> ClientAxis:
        """A layout with as many of its lanes as fit into the memory of a device.

        The compiler reports the memory of a round before anything runs. The run then compiles the round again, from the
        compilation cache. Several processes use all lanes, because their devices may have different limits.
        """
        limit = memory_limit(axis)
        if axis.lanes == 1 or math.isinf(limit) or jax.process_count() > 1:
            return axis
        if self._data_on_host:
            return axis  # the program depends on samples that are sent for each round, so it cannot be compiled ahead

        def needed(axis: ClientAxis) -> int:
            described = dataclasses.replace(axis, described=True)
            programs = self._rounds(described).compile()
            return max(memory_needed(programs.compiled(name)) for name in programs)

        return lanes_that_fit(axis, limit, needed)

    def _rounds(self, axis: ClientAxis) -> Rounds:
        return Rounds(
            self._constants,
            axis,
            trial=OneTrial(axis, self._stop_at_divergence, self.code),
            memory_on_host=self._memory_on_host,
            data_on_host=self._data_on_host,
            remote=None if self._remote is None else self._remote.train,
        )

    def _code_of(self, strategy: str | Callable, hyper: Any) -> Hashable:
        """See the attribute ``code``."""
        local, networks = self.problem.local, self.model.networks
        registered = self._name if self._name in STRATEGIES else None
        rule = OPTIMIZERS[local.rule] if isinstance(local.rule, str) else local.rule
        parts = [strategy, hyper, rule, local.augment, local.mix, local.gradient, local.schedule]
        parts += [network.module for network in networks]
        task = self.model.task
        parts += [
            type(task),
            task.criterion,
            *(metric.sums for metric in task.metrics),
        ]
        ours = (registered is None or STRATEGIES.is_ours(registered)) and not getattr(hyper, "users_code", False)
        ours = ours and names_only_ours(hyper)
        ours = ours and all(each is None or is_of_this_package(each) for each in parts if not isinstance(each, str))
        return None if ours else object()

    def _needs_host_memory(self, layout: Layout, axis: ClientAxis) -> bool:
        """Whether the clients' memories are kept on the host: as requested, or if they are too large."""
        strategy = self._constants.strategy
        if strategy.init_memory is None:
            return False
        if jax.process_count() > 1:  # the memories are divided over the devices by parameters
            if layout.memory == "host":
                raise UserError(
                    "memory=host is for one process: several processes divide the memories over their devices"
                )
            return False
        one = jax.eval_shape(strategy.init_memory, random_key(0), np.int32(0))
        return memory_on_host(layout, self.problem.num_clients * trees.num_bytes(one), axis)


# --- parts of a simulator -------------------------------------------------------------------------------------------


def _builder(strategy: str | Callable[[Any, Problem], Strategy], hyper: Any) -> Build:
    """The function problem -> strategy. A registered function has the same default settings as its name."""
    row = next((row for name, row in STRATEGIES.items() if strategy in (name, row.build)), None)
    if hyper is None and row is not None and row.hyper is not None:
        hyper = row.hyper()
    if not isinstance(strategy, str):
        if not callable(strategy):
            kind = type(strategy).__name__
            raise UserError(f"the strategy must be a name or a function build(hyper, problem), not a {kind}")
        try:
            inspect.signature(strategy).bind(hyper, None)
        except TypeError as error:
            raise UserError(f"the strategy must be a name or a function build(hyper, problem): {error}") from None
        return bind(strategy, hyper)
    if row is None:
        raise unknown_name("strategy", strategy, STRATEGIES)
    if type(hyper) is not (row.hyper or type(None)):
        wanted = f"a {row.hyper.__module__}.{row.hyper.__qualname__}" if row.hyper else "nothing"
        raise UserError(f"hyper= of {strategy} is {wanted}, not a {type(hyper).__name__}")
    check(hyper)
    return bind(row.build, hyper)


def _check_cohort(cohort: Any, num_clients: int) -> None:
    if not isinstance(cohort, int | np.integer) or not 1 <= cohort <= num_clients:
        raise UserError(f"cohort={cohort} is out of range: it must be from 1 to the number of clients, {num_clients}")


def _require_whole(name: str, value: Any, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        limits = f"of at least {least}" if math.isinf(most) else f"from {least} to {most}"
        raise UserError(f"{name}={value!r} must be a whole number {limits}")


def _refuse_consumed(state: Progress) -> None:
    refuse_settings()  # before anything else works on the state, such as in a forked process
    if not isinstance(state, Progress):
        raise UserError(
            f"a state comes from init(), or is the first of the two results of run(state), but this is a "
            f"{type(state).__name__}"
        )
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)):
        raise UserError("this state was consumed by an earlier run(state): use the state that it returned, or init()")


def task_of(
    federated: FederatedData,
    task: Task | None = None,
    loss: str | Criterion | None = None,
    metrics: Sequence[str | Metric] = (),
    settings: Any = None,
) -> Task | None:
    """The task of a federation with a loss and metrics, see `Simulator`; None if all are the defaults.

    Args:
      federated: the clients' data.
      task: what is learned. Default: the task of the dataset.
      loss: the loss in training. Default: that of the task.
      metrics: the numbers of a test. Default: those of the task.
      settings: the settings of a loss given by name. Default: its defaults.

    Raises:
      UserError: the targets do not fit the task, or a loss or metric does not suit it.
    """
    if task is None and loss is None and not metrics:
        return None
    dataset = federated.dataset
    if task is not None:
        if not isinstance(task, Task):
            raise UserError(f"task= is an fmr.Task, not a {type(task).__name__}")
        task.check(dataset.x, dataset.y, f"{dataset.name}: the training set")
        task.check(dataset.test_x, dataset.test_y, f"{dataset.name}: the test set")
    task = with_metrics(task or dataset.task, metrics)
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise unknown_name("loss", loss, LOSSES)
        counts = federated.label_counts().sum(axis=0) if "classes" in task.provides else None
        return with_loss(task, loss, settings, counts)
    return dataclasses.replace(task, criterion=loss) if loss is not None else task


def require_task(name: str, task: Task) -> None:
    """Check that a method suits a task.

    Raises:
      UserError: the method needs something that the task has not, such as a class per sample.
    """
    needs = STRATEGIES[name].needs
    if needs and needs not in task.provides:
        what = {"classes": "a class per sample"}.get(needs, needs)
        raise UserError(f"{name} needs {what}, but the task is {task.name}: choose another method")


def network_of(model: Any, dataset: Dataset, *, task: Task | None = None, init: str = "torch", **options: Any) -> Model:
    """The network for the samples of a dataset; a `Zoo` if there are several.

    Args:
      model: a name in `MODELS`, a Flax module, a `Model`, or a list of them. A `Model` with the input shape of the
        samples is returned unchanged.
      dataset: the samples.
      task: what is learned. Default: that of a `Model` that has been made for one, else that of the dataset.
      init: initialisation of networks chosen by name, see `models.build`.
      options: ``norm``, ``authors_state``, ``projection`` and ``remat``, see `models.build`.

    Raises:
      UserError: a network does not fit the samples. Raised before any compilation.
    """
    if isinstance(model, Model) and not options and model.input_shape == dataset.x.shape[1:]:
        model = with_fields(model, task=task or (model.task if model.task.metrics else dataset.task))
        for each in model.networks:
            models.check_output(each)
        return model
    tokens = np.issubdtype(dataset.x.dtype, np.signedinteger)
    facts: dict[str, Any] = {
        "input_shape": dataset.x.shape[1:],
        "input_dtype": np.int32 if tokens else np.float32,
        "task": task or dataset.task,
    } | options
    columns = {"vocabulary": dataset.vocabulary, "categories": dataset.categories}
    several = model if isinstance(model, list | tuple) else [model]
    networks = [
        models.build(each, **facts, **columns, init=init) if isinstance(each, str) else models.of_module(each, **facts)
        for each in several
    ]
    return networks[0] if len(networks) == 1 else Zoo.of(networks)


def problem_of(
    model: Model,
    local: LocalSetting,
    federated: FederatedData,
    *,
    cohort: int,
    architectures: Sequence[int] | np.ndarray | None = None,
    samples_on_device: bool = True,
) -> Problem:
    """The facts of a federation that its strategy may use.

    Args:
      model: the network.
      local: the settings of the clients' training. Its ``max_size`` is replaced by the size of the largest client,
        `rounded_up`. It changes no random draw.
      federated: the clients' data.
      cohort: K.
      architectures: for each client, the number of its initial network [N]. Default: blocks of neighbouring clients.
      samples_on_device: see `Problem`.

    Raises:
      UserError: K is not in 1..N, or a client has no number of a network.
    """
    count, kept = federated.num_clients, federated.validation
    _check_cohort(cohort, count)
    if not isinstance(local, LocalSetting):
        raise UserError(f"local= is what local.setting(...) returns, not a {type(local).__name__}")
    numbers = np.arange(count) * len(model.networks) // count if architectures is None else np.asarray(architectures)
    whole = np.issubdtype(numbers.dtype, np.integer) and numbers.shape == (count,)
    if not whole or numbers.min() < 0 or numbers.max() >= len(model.networks):
        raise UserError(
            f"architectures must be {count} numbers from 0 to {len(model.networks) - 1}: for each client, the number "
            "of its network"
        )
    return Problem(
        model=model,
        local=dataclasses.replace(jax.tree.map(np.float32, local), max_size=rounded_up(int(federated.sizes.max()))),
        num_clients=count,
        cohort_size=cohort,
        num_classes=federated.dataset.num_classes,
        layers=model.layers(),
        sizes=jnp.asarray(federated.sizes, jnp.int32),
        label_counts=jnp.asarray(federated.label_counts(), jnp.int32),
        architectures=jnp.asarray(numbers, jnp.int32),
        public=public_samples(federated),
        validation_sizes=None if kept is None else jnp.asarray(kept.sizes, jnp.int32),
        samples_on_device=samples_on_device,
    )


def rounded_up(size: int) -> int:
    """A size rounded up to a power of four, so that seeds and partitions share compiled programs."""
    return 4 ** -(-(size - 1).bit_length() // 2)


def normalised(dataset: Dataset, x: np.ndarray, y: np.ndarray) -> Samples:
    """Samples with the normalisation of the dataset, (pixel - mean) / std, as a factor and a summand."""
    scale, shift = scale_and_shift(dataset.mean, dataset.std, x.dtype)
    return Samples(x, np.asarray(y, dataset.task.dtype), scale, shift).in_rows()


def public_samples(federated: FederatedData) -> Samples | None:
    """Public samples held by the server, or None. ``y`` is None if they are unlabelled."""
    public = federated.public
    if public is None:
        return None
    task = federated.dataset.task
    unknown = np.zeros((len(public.x), *task.target_shape(public.x.shape[1:])), task.dtype)
    labels = unknown if public.y is None else public.y
    known = normalised(federated.dataset, public.x, labels)
    return known._replace(y=None) if public.y is None else known
