"""A trained network: its predictions for raw samples, and its export into a folder that loads without this package."""

import dataclasses
import functools
import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import files
from fedjax_mr.client.local import evaluation_batch
from fedjax_mr.client.samples import Samples, gather
from fedjax_mr.data import tokens as numbers
from fedjax_mr.data.chat import asked
from fedjax_mr.data.facts import Facts
from fedjax_mr.data.inputs import scale_and_shift
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.checkpoint import save_arrays
from fedjax_mr.keys import random_key
from fedjax_mr.models import MODELS, Model, Variables, calls, generation
from fedjax_mr.models.nnx_module import NNXModule
from fedjax_mr.results import manifest

VARIABLES, NETWORK = "variables", "network.json"  # files of an exported network
PLAIN = (bool, int, float, str, type(None))
COLDEST, HOTTEST = 0.05, 20.0  # the range of temperatures


def without_weights(logits: jax.Array, weights: Sequence[float]) -> jax.Array:
    """Logits [n, C] of a network that was trained with class weights as those of one without; (): no weights."""
    return logits - jnp.log(jnp.asarray(weights, logits.dtype))[None] if len(weights) else logits


@dataclasses.dataclass(frozen=True)
class TrainedNetwork:
    """A network with its variables and the normalisation of its samples.

    Attributes:
      model: the network.
      variables: its Flax collections.
      samples: the kind of samples that it was trained on.
      origin: its origin by name: strategy, round, client.
      temperature: what logits are divided by before they become probabilities, see `calibrated`.
      weights: weights of the classes in the training loss, whose logarithms are then subtracted. (): none.
    """

    model: Model
    variables: Variables = dataclasses.field(repr=False)
    samples: Facts
    origin: dict[str, Any]
    temperature: float = 1.0
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, model: Model, variables: Variables, samples: Facts, **origin: Any) -> "TrainedNetwork":
        """A trained network. Of a `Zoo`, the one that the variables belong to."""
        number = int(model.architecture(variables))
        unpacked = jax.tree.map(np.asarray, model.unpack(variables, number))
        return cls(model.networks[number], unpacked, samples, origin)

    @property
    def module(self) -> Any:
        """The Flax module with its variables, for normalised samples. Adapters are added to its weights.

        A module of NNX is in evaluation mode, and its random streams start from key 0. A module of Linen is bound:
        ``module(x, train=False)``.
        """
        return self.model.bound(self.variables)

    def predict(self, x: Any) -> np.ndarray:
        """Predict raw samples [n, ...], which are normalised here: for classes their probabilities [n, C].

        Other tasks: `Task.predict`, such as numbers [n, C] in the unit of the targets, or classes of pixels.

        Args:
          x: the samples as the source has them: bytes in 0..255, floats in the range of the training samples.

        Raises:
          UserError: the samples have another shape, type or range.
        """
        outputs = jnp.asarray(self.outputs(x)) / self.temperature
        return np.asarray(self.samples.learned.predict(without_weights(outputs, self.weights)))

    def outputs(self, x: Any) -> np.ndarray:
        """Compute the outputs [n, ...] of the network, such as logits, for raw samples; see `predict`."""
        x = self.samples.samples(x)
        size = max(1, min(evaluation_batch(self.model), len(x)))
        batches = [np.zeros((0, *self.samples.learned.outputs(self.samples.shape)), np.float32)]
        for first in range(0, len(x), size):
            batch = x[first : first + size]
            filled = np.concatenate([batch, np.repeat(batch[:1], size - len(batch), axis=0)])
            batches.append(np.asarray(self._outputs(self.model, self.variables, filled))[: len(batch)])
        return np.concatenate(batches)

    @functools.cached_property
    def _outputs(self) -> Callable[[Model, Variables, np.ndarray], jax.Array]:
        """The compiled function from the network, its variables and raw samples to outputs."""
        scale, shift = scale_and_shift(self.samples.mean, self.samples.std, self.samples.dtype)

        def outputs(model: Model, variables: Variables, x: jax.Array) -> jax.Array:
            rows = jnp.arange(len(x), dtype=jnp.int32)
            return model.apply(variables, gather(Samples(x, rows, scale, shift), rows))

        return jax.jit(outputs)

    def calibrated(self, x: Any, y: Any, *, weights: Sequence[float] = ()) -> "TrainedNetwork":
        """The network with calibrated probabilities: the temperature that minimises the loss on samples.

        One number divides all logits (Guo et al., ICML 2017). The most probable classes stay the same. The samples must
        not be those of the training; use validation samples (`SavedRun.calibrated`).

        A loss with class weights teaches the network probabilities that are proportional to weight times probability.
        With ``weights``, these factors are taken out, and then rare classes are less often the most probable ones.

        Args:
          x: raw samples [n, ...], see `predict`.
          y: their targets [n, ...].
          weights: the weights of the C classes in the training loss. Default: there were none.

        Raises:
          UserError: the outputs of the task are no logits, or there are no samples.
        """
        task, outputs = self.samples.learned, jnp.asarray(self.outputs(x))
        if task.provides.isdisjoint({"logits", "labels"}):
            raise UserError(f"only probabilities are calibrated, and the task {task.name} has none")
        if not len(outputs):
            raise UserError("calibration needs samples with targets")
        targets, mask = jnp.asarray(np.asarray(y, task.dtype)), jnp.ones(len(outputs))
        at = lambda logarithm: without_weights(outputs / jnp.exp(logarithm), weights)
        loss = jax.jit(lambda logarithm: jnp.mean(task.loss(at(logarithm), targets, mask)))
        low, high = np.log(COLDEST), np.log(HOTTEST)
        for _ in range(40):  # thirds of the interval; the loss is convex in the inverse temperature
            one, other = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, other) if loss(one) <= loss(other) else (one, high)
        return dataclasses.replace(self, temperature=float(np.exp((low + high) / 2)), weights=tuple(weights))

    def generate(
        self, prompt: str, tokenizer: str | None, *, chat: bool, tokens: int, seed: int, **options: Any
    ) -> str:
        """Write a text of at most ``tokens`` tokens after a prompt, see `SavedRun.generate`."""
        text = asked(tokenizer, prompt) if chat else prompt
        (row,), _ = numbers.numbered([text], tokenizer)
        options |= {"key": random_key(seed), "count": tokens, "stop": numbers.special(tokenizer)}
        (written,) = generation.generate(self.model, self.variables, [row], **options)
        return numbers.decode(written, tokenizer)

    @property
    def has_format(self) -> bool:
        """Whether the network is exported in the format of its source (`models.ModelRow.export`)."""
        return getattr(MODELS.get(self.model.name), "export", None) is not None

    def export(self, folder: Path | str, *, merged: bool = False) -> Path:
        """Write a folder that loads with only orbax and Flax, and return its path.

        It contains ``variables`` (orbax), ``network.json`` (class, fields, normalisation), ``example.py``,
        ``README.md`` and ``manifest.json``, the checksums of the variables. The variables are all those of the module,
        also the frozen ones. A network with a format of its source is written in that (`models.ModelRow.export`).

        Args:
          folder: the new folder.
          merged: whether to add the adapters to the weights of the network.

        Raises:
          UserError: the folder is not empty, or cannot be written; or the network has adapters and ``merged`` is False.
        """
        if self.model.adapter is not None and not merged:
            raise UserError(
                f"{self.model.name} has adapters, which plain Flax does not know: add --merged (merged=True)"
            )
        variables = self.model.merged(self.variables)
        write = MODELS[self.model.name].export if self.has_format else None
        folder, texts = Path(folder), {} if self.has_format else self._texts(variables)
        created: list[Path] = []
        try:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(f"{folder} already exists and is not empty: choose a new folder")
            created = files.make_folder(folder)
            if write is not None:
                write(self.model.module, variables, folder)
                return folder
            save_arrays(folder / VARIABLES, variables)
            texts[manifest.MANIFEST] = manifest.text_of(manifest.checksums(folder))  # of the variables alone
            for name, text in texts.items():
                with files.atomic_write(folder / name) as path:
                    path.write_text(text, encoding="utf-8")
        except OSError as error:
            if created:
                shutil.rmtree(created[-1], ignore_errors=True)
            raise UserError(f"cannot write into {folder} ({error.strerror or error})") from None
        return folder

    def _in_evaluation_mode(self) -> tuple[Any, dict[str, Any]]:
        """The module in evaluation mode, and the arguments of its call beside the samples."""
        x, known = jax.ShapeDtypeStruct((1, *self.model.input_shape), self.model.input_dtype), self.model.module
        if isinstance(known, NNXModule):
            names = calls.accepted(known.kind, "__call__")
            return known, {name: not on for name, on in calls.SWITCHES.items() if name in names}

        def call(module: Any, **switches: Any) -> tuple[Any, dict[str, Any]]:
            jax.eval_shape(lambda variables, x: module.apply(variables, x, **switches), self.model.module_shapes(), x)
            return module, switches

        return calls.in_mode(call, known, "__call__", train=False)

    def _texts(self, variables: Variables) -> dict[str, str]:
        """The content of the files beside the variables, by name."""
        module, arguments = self._in_evaluation_mode()
        of_nnx, samples = isinstance(module, NNXModule), self.samples
        tokens = samples.vocabulary > 0
        kind = module.kind if of_nnx else type(module)
        scale, shift = scale_and_shift(samples.mean, samples.std, samples.dtype)
        fields = {
            field.name: getattr(module, field.name)
            for field in (() if of_nnx else dataclasses.fields(module))
            if field.init and field.name not in ("parent", "name")
        }
        ours = kind.__module__.startswith("fedjax_mr.")
        place = kind.__module__ if kind.__module__ != "__main__" else _script(kind)
        content = {
            "name": self.model.name,
            "class": f"{place}.{kind.__name__}",
            "fields": {name: value if _is_plain(value) else _name(value) for name, value in fields.items()},
            "input_shape": samples.shape,
            "input_dtype": samples.dtype,
            "num_classes": samples.num_classes,
            "scale": scale.tolist(),
            "shift": shift.tolist(),
            "data": json.loads(samples.text()),
            "parameters": sum(np.size(leaf) for leaf in jax.tree.leaves(variables["params"])),
        } | self.origin
        open_fields = [f"{name} ({_name(value)})" for name, value in fields.items() if not _is_plain(value)]
        note = "requires fedjax_mr, only for this class" if ours else "your own class: put its file beside this one"
        words = {
            "PLACE": place,
            "CLASS": kind.__name__,
            "ARGUMENTS": "rngs=nnx.Rngs(0)" * of_nnx
            + ", ".join(f"{name}={value!r}" if _is_plain(value) else f"{name}=..." for name, value in fields.items()),
            "OPEN": f"  # fill in {', '.join(open_fields)}" if open_fields else "  # and its other arguments" * of_nnx,
            "CALLED": "".join(f", {name}={value}" for name, value in arguments.items()),
            "NOTE": note,
            "NAME": self.model.name,
            "ORIGIN": ", ".join(f"{name} {value}" for name, value in self.origin.items() if value is not None),
            "SHAPE": ", ".join(map(str, samples.shape)),
            "KIND": f"{samples.dtype} from {samples.low:g} to {samples.high:g} in training",
            "PREDICTED": samples.learned.predicted,
            "FORMULA": samples.learned.formula,
            "JAX": "import jax\n" * ("jax." in samples.learned.formula),
            "TASK": 'task = network["data"]["task"]\n' * ("task[" in samples.learned.formula),
            "IMPORT_NNX": "from flax import nnx\n" * of_nnx,
            "FILL": FILL * of_nnx,
            "NORMALISED": NORMALISED * (not tokens),
            "CALL": "module(" if of_nnx else "module.apply(variables, ",
            "INPUT": "x" if tokens else "normalised",
            "CALIBRATION": (f" / {self.temperature:.6g}" * (self.temperature != 1))
            + (f" - np.log({self.weights})" * bool(self.weights)),
        }
        fill = lambda text: functools.reduce(lambda text, word: text.replace(f"@{word}@", words[word]), words, text)
        return {
            NETWORK: json.dumps(content, indent=2) + "\n",
            "example.py": fill(EXAMPLE),
            "README.md": fill(README),
        }


def _is_plain(value: Any) -> bool:
    """Whether JSON, and Python's repr, can represent a value."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _script(kind: type) -> str:
    """The name of the file that defines a class of the running script."""
    try:
        return Path(inspect.getfile(kind)).stem
    except (TypeError, OSError):  # defined in a console
        return "your_file"


EXAMPLE = '''"""Print the @PREDICTED@: python example.py [SAMPLES.npy]. Needs flax and orbax-checkpoint."""

import json
import sys
from pathlib import Path

@JAX@import numpy as np
import orbax.checkpoint
@IMPORT_NNX@
from @PLACE@ import @CLASS@  # @NOTE@

folder = Path(__file__).resolve().parent
network = json.loads((folder / "network.json").read_text())
variables = orbax.checkpoint.StandardCheckpointer().restore(folder / "variables")
module = @CLASS@(@ARGUMENTS@)@OPEN@
@FILL@
# Raw samples as the source has them, [n, @SHAPE@]: @KIND@.
x = np.load(sys.argv[1]) if len(sys.argv) > 1 else np.zeros((1, *network["input_shape"]), network["input_dtype"])
@NORMALISED@outputs = np.asarray(@CALL@@INPUT@@CALLED@))@CALIBRATION@
@TASK@predictions = @FORMULA@
print(json.dumps(np.asarray(predictions).tolist()))
'''


NORMALISED = 'normalised = x.astype(np.float32) * np.float32(network["scale"]) + np.float32(network["shift"])\n'

FILL = """module.eval()
for path, variable in nnx.iter_graph(module):
    if isinstance(variable, nnx.Param | nnx.BatchStat):
        value = variables["params" if isinstance(variable, nnx.Param) else "batch_stats"]
        for name in path:
            value = value[str(name)]
        variable[...] = value
"""

README = """# @NAME@

@ORIGIN@.

- `variables`: all Flax collections, written by orbax: `orbax.checkpoint.StandardCheckpointer().restore(PATH)`.
  `manifest.json` has their checksums (CRC-32), which a run that starts from this folder compares.
- `network.json`: the class of the network and its fields, the samples, and their normalisation: the network sees
  `x * scale + shift`.
- `example.py`: `python example.py [SAMPLES.npy]` prints the @PREDICTED@
  for samples [n, @SHAPE@], @KIND@.

The class of the network is `@PLACE@.@CLASS@` (@NOTE@). The variables need only orbax.
"""
