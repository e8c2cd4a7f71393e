"""Networks by name: ``build("lenet5", ...)``. One file per family; each network is an ordered list of blocks."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from fedjax_mr import registry
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.models import (
    cnn,
    llama,
    lstm,
    nnx_module,
    pfedhr,
    pretrained,
    resnet,
    sequences,
    table,
    transformer,
    unet,
    user_module,
    vgg,
)  # fmt: skip
from fedjax_mr.models.base import BlockNet, Layer, Model, Variables, describe
from fedjax_mr.models.zoo import Zoo
from fedjax_mr.registry import Registry
from fedjax_mr.tasks import Classification, Language, Segmentation, Task

if TYPE_CHECKING:
    from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """A registered network. Only the first field is required: ``MODELS["mine"] = ModelRow(MyNetwork)``.

    Attributes:
      network: a Flax module, or a function that makes one. The function is called with ``num_classes`` and with those
        of ``initialisation``, ``projection``, ``vocabulary``, ``categories`` and ``per_position`` that it accepts. A
        function that builds an NNX module also has the argument ``rngs``.
      input_shape: shape of one sample in the source, for the table of networks. (): the table omits the network.
      num_classes: C in the source.
      source: the paper or code that the network comes from.
      input_dtype: float32 for images and vectors, int32 for token sequences.
      pretrained: reads pretrained variables from a folder or file: all or all but those of the head. None: there are
        none.
      task: what the network learns in the source.
      export: (module, variables, folder) -> None. Writes the network in the format of its source. None: there is none.
    """

    network: "Callable[..., nn.Module | nnx.Module] | nn.Module | nnx.Module"
    input_shape: tuple[int, ...] = ()
    num_classes: int = 10
    source: str = ""
    input_dtype: Any = np.float32
    pretrained: Callable[[str], Variables] | None = None
    task: type[Task] = Classification
    export: Callable[[Any, Variables, Path], None] | None = None


CIFAR, GREY, TEXT, SENTENCE, SERIES, TOKENS = (32, 32, 3), (28, 28, 1), (80,), (48,), (50, 6), (64,)

SIZES = {"small": {"scale": 0.5}, "large": {"scale": 2.0}, "deep": {"deep": True}}
"""Variants of a small network, for experiments in which clients have different networks."""


def _is_module(network: Any) -> bool:
    return isinstance(network, nn.Module) or nnx_module.is_instance(network)


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `MODELS`.

    Raises:
      UserError: the row is not a `ModelRow`.
    """
    if not isinstance(row, ModelRow) or not (_is_module(row.network) or callable(row.network)):
        raise UserError(f"fmr.MODELS[{name!r}] takes fmr.ModelRow(MyNetwork)")


_OURS: dict[str, ModelRow] = {
    "cnn_digits": ModelRow(cnn.CNNDigits, (8, 8, 1), 10, "this project, for the quickstart"),
    **{
        f"cnn_digits_{size}": ModelRow(
            functools.partial(cnn.CNNDigits, **options), (8, 8, 1), 10, "this project, a variant of cnn_digits"
        )
        for size, options in SIZES.items()
    },
    "lenet5": ModelRow(cnn.LeNet5, CIFAR, 10, "FedMR's and FedCross's code (CNN on CIFAR)"),
    **{
        f"lenet5_{size}": ModelRow(
            functools.partial(cnn.LeNet5, **options), CIFAR, 10, "this project, a variant of lenet5"
        )
        for size, options in SIZES.items()
    },
    "cnn_mcmahan": ModelRow(cnn.CNNMcMahan, CIFAR, 10, "McMahan et al., AISTATS 2017"),
    "cnn_femnist": ModelRow(cnn.CNNFEMNIST, GREY, 62, "FedMR's code (CNN on FEMNIST)"),
    "cnn_pfl": ModelRow(cnn.CNNPfl, CIFAR, 10, "pfl-research's benchmarks (CIFAR10-IID)"),
    "mlp": ModelRow(cnn.MLP, GREY, 10, "McMahan et al., AISTATS 2017 (2NN)"),
    "mlp_table": ModelRow(table.MLPTable, (8,), 2, "this project; vectors of categories as in Guo and Berkhahn, 2016"),
    "logistic": ModelRow(cnn.Logistic, GREY, 10, "convex experiments"),
    "unet": ModelRow(
        unet.UNet, GREY, 2, "Ronneberger et al., MICCAI 2015; narrower, normalised, padded", task=Segmentation
    ),
    "resnet20": ModelRow(resnet.ResNet20, CIFAR, 10, "FedMR's and FedCross's code"),
    "resnet20_he": ModelRow(resnet.ResNet20He, CIFAR, 10, "He et al., CVPR 2016"),
    "vgg16": ModelRow(vgg.VGG16, CIFAR, 10, "FedMR's and FedCross's code (CIFAR)"),
    "vgg_femnist": ModelRow(vgg.VGGFEMNIST, GREY, 62, "FedMR's code (VGG-16 on FEMNIST)"),
    **{
        f"vgg{depth}_fedma": ModelRow(functools.partial(vgg.VGGFedMA, depth=depth), CIFAR, 10, "FedMe's code")
        for depth in vgg.STAGES
    },
    **{
        f"cnn{i}": ModelRow(functools.partial(cnn.CNNFedMe, depth=i), GREY, 62, "FedMe's code (FEMNIST)")
        for i in range(1, 5)
    },
    **{
        f"lstm{i}": ModelRow(
            functools.partial(lstm.CharacterLSTM, depth=i), TEXT, 90, "FedMe's code (Shakespeare)", np.int32
        )
        for i in range(1, 5)
    },
    "gru": ModelRow(sequences.RecurrentNetwork, SERIES, 7, "this project; the unit of Cho et al., EMNLP 2014"),
    "lstm_numbers": ModelRow(
        functools.partial(sequences.RecurrentNetwork, cell="lstm"), SERIES, 7, "this project, gru with an LSTM"
    ),
    "vit_tiny": ModelRow(transformer.ViT, CIFAR, 10, "FedTP's code (ViT on CIFAR); the depth is ours"),
    "vit_tiny_patch8": ModelRow(
        functools.partial(transformer.ViT, patch=8), CIFAR, 10, "this project, vit_tiny with a quarter of the patches"
    ),
    "transformer_tiny": ModelRow(
        transformer.CausalTransformer, TEXT, 80, "FedTP's code (Transformer on Shakespeare), made causal", np.int32
    ),
    "minilm": ModelRow(
        transformer.BERT,
        SENTENCE,
        2,
        "MiniLM-L6-H384 (Wang et al., NeurIPS 2020), mean pooling",
        np.int32,
        functools.partial(pretrained.bert, heads=12, depth=6),
    ),
    **{
        name: ModelRow(
            functools.partial(llama.Llama, **sizes),
            TOKENS,
            vocabulary,
            source,
            np.int32,
            functools.partial(pretrained.llama, sizes=sizes),
            Language,
            pretrained.write_llama,
        )
        for name, sizes, vocabulary, source in (
            ("llama_tiny", llama.TINY, 257, "this project; Llama's architecture (Touvron et al., 2023) in two layers"),
            ("smollm2_135m", llama.SMOLLM2_135M, 49_152, "SmolLM2-135M (Ben Allal et al., 2025)"),
        )
    },
    "pfedhr_m1": ModelRow(pfedhr.M1, CIFAR, 10, "pFedHR's code (CNN1)"),
    "pfedhr_m2": ModelRow(pfedhr.M2, CIFAR, 10, "pFedHR (M1 with a third convolution)"),
    "pfedhr_m3": ModelRow(pfedhr.M3, CIFAR, 10, "pFedHR's code (CNN3)"),
    "pfedhr_m4": ModelRow(pfedhr.M4, CIFAR, 10, "pFedHR's code (CNN4)"),
}
MODELS = Registry("model", "fmr.MODELS", check_row, _OURS)
"""Every network by its name."""


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int = 0,
    input_dtype: Any = np.float32,
    init: str = "torch",
    norm: str = "batch",
    authors_state: bool = False,
    projection: int = 0,
    remat: bool = False,
    vocabulary: int = 0,
    categories: tuple[int, ...] = (),
    task: Task | None = None,
) -> Model:
    """Build the network ``name`` for samples of ``input_shape``.

    Args:
      name: a key of `MODELS`.
      input_shape: [H, W, channels] of images, [T] of token sequences, [T, F] of sequences of numbers, [F] of rows.
      num_classes: C, without a ``task``.
      input_dtype: float32 for images and vectors, int32 for token sequences.
      init: ``torch`` (the authors' initialisation) or ``flax``.
      norm: ``batch`` or ``group``, for networks with normalisation.
      authors_state: whether the state includes the tensors of the released code that affect no output: BatchNorm's
        batch counters and the final BatchNorm of ``resnet20``.
      projection: width of a projection head in front of the classifier (Li et al., MOON, CVPR 2021: 256). 0 disables
        it.
      remat: whether activations inside a layer are computed again in the backward pass, for networks that can.
      vocabulary: number of different tokens. 0: the number of classes, or what the network was trained on.
      categories: for each column of a table the number of its categories, or 0 for numbers. (): all are numbers.
      task: what the network learns. Default: classification with C classes.

    Raises:
      UserError: the name is unknown, an option is unknown or does not apply to the network, or the samples or the task
        do not fit the network. All checks run before anything is compiled.
    """
    if task is None and num_classes < 1:
        raise UserError("a network needs num_classes= or task=")
    task = task or Classification(width=num_classes)
    if registry.is_supplied(name):
        raise registry.not_passed("model", name)
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    if init not in ("torch", "flax"):
        raise unknown_name("init", init, ("torch", "flax"))
    if norm not in ("batch", "group"):
        raise unknown_name("norm", norm, ("batch", "group"))
    if authors_state and norm != "batch":
        raise UserError(f"authors_state=True needs batch normalisation, not norm={norm}; drop one of the two")
    outputs = task.outputs(tuple(input_shape))
    network = _network(
        name, num_classes=outputs[-1], initialisation=init, projection=projection, vocabulary=vocabulary,
        categories=tuple(categories), per_position=len(outputs) == 2 and outputs[0] == input_shape[0],
    )  # fmt: skip
    if not isinstance(network, BlockNet):
        return of_module(
            network, input_shape=input_shape, input_dtype=input_dtype, name=name, norm=norm,
            authors_state=authors_state, projection=projection, remat=remat, task=task,
        )  # fmt: skip
    if projection and (len(outputs) > 1 or not network.has_representation):
        raise UserError(f"projection={projection}: {name} has no representation to project; use another model, or 0")
    options: dict[str, Any] = {"norm": norm} if norm != "batch" else {}
    options |= {"authors_state": True} if authors_state else {}
    options |= {"remat": True} if remat else {}
    for option, value in options.items():
        if not hasattr(network, option):
            raise UserError(f"{option}={value} does not apply to the model {name}; leave it out")
    network = network.clone(**options)
    model = Model(network, tuple(input_shape), input_dtype, name, task=task)
    _check_fit(model, network.takes)
    check_output(model)
    return model


def as_in_source(name: str) -> Model:
    """The network ``name`` for samples and task as in its source."""
    row = MODELS[name]
    task = row.task(width=row.num_classes)
    return build(name, input_shape=row.input_shape, input_dtype=row.input_dtype, task=task)


def _network(name: str, **options: Any) -> Any:
    """The module of a row, built with the options that its function accepts; for NNX, a function of ``rngs``."""
    row = MODELS[name]
    network = getattr(row, "network", None)
    if _is_module(network):
        return network
    if not callable(network):
        raise UserError(f"MODELS[{name!r}] is not a ModelRow: write MODELS[{name!r}] = ModelRow(MyNetwork)")
    later = ("rngs",) if nnx_module.takes_rngs(network) else ()
    parameters = nnx_module.parameters(network)
    missing = [
        each.name
        for each in parameters.values()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD and each.name not in (*options, *later)
    ]
    if missing:
        raise UserError(
            f"MODELS[{name!r}] is called without {', '.join(missing)}: give these arguments defaults, or wrap the "
            "network in a function of num_classes"
        )
    accepted = {option: value for option, value in options.items() if option in parameters}
    return _later(network, tuple(accepted.items())) if later else network(**accepted)


@functools.cache
def _later(network: Callable, options: tuple[tuple[str, Any], ...]) -> Callable:
    """A function of ``rngs``. Equal arguments give the same function, so that equal networks share programs."""
    return functools.partial(network, **dict(options))


def of_module(
    module: Any,
    *,
    input_shape: tuple[int, ...],
    num_classes: int = 0,
    input_dtype: Any = np.float32,
    norm: str = "batch",
    authors_state: bool = False,
    projection: int = 0,
    remat: bool = False,
    name: str = "",
    task: Task | None = None,
) -> Model:
    """Wrap a Flax module, or a `Model`, as a network for samples of ``input_shape``; see `user_module.bind`.

    Raises:
      UserError: the module does not fit the samples or the task, or an option is set that only applies to built-in
        networks.
    """
    for option, value, default in (
        ("norm", norm, "batch"), ("authors_state", authors_state, False), ("projection", projection, 0),
        ("remat", remat, False),
    ):  # fmt: skip
        if value != default:
            raise UserError(f"{option}={value} only applies to built-in networks: build it into the module instead")
    facts: dict[str, Any] = {"input_shape": input_shape, "input_dtype": input_dtype}
    facts |= {"num_classes": num_classes, "task": task}
    if not isinstance(module, Model):
        return user_module.bind(module, **facts, name=name)
    if len(module.networks) > 1:
        return Zoo.of([of_module(each, **facts) for each in module.networks])
    kept = {each: getattr(module, each) for each in ("frozen", "start", "adapter", "precision", "convolution")}
    return dataclasses.replace(user_module.bind(module.module, **facts, name=name or module.name), **kept)


def _check_fit(model: Model, takes: str) -> None:
    shape = model.input_shape
    sample = describe(model.input_shape, model.input_dtype)
    integer = jnp.issubdtype(model.input_dtype, jnp.integer)
    if takes == "tokens" and not (integer and len(shape) == 1):
        raise UserError(f"{model.name} needs token sequences [T] of integers, but the samples are {sample}")
    if takes != "tokens" and integer:
        raise UserError(
            f"{model.name} needs {takes}, but the samples are token sequences ({sample}), as are all integers [M, T]: "
            "use lstm2 or transformer_tiny, or x.astype('float32') if the integers are measurements"
        )
    if takes == "images" and len(shape) != 3:
        raise UserError(
            f"{model.name} needs images [height, width, channels], but the samples are {sample}; mlp and logistic take "
            "numbers of any shape"
        )
    if takes == "images" and shape[0] in (1, 3) and shape[-1] > 4:
        raise UserError(
            f"{model.name} needs images with the channels last, but the samples are {sample}; transpose them"
        )
    if takes == "sequences" and len(shape) != 2:
        raise UserError(f"{model.name} needs sequences of numbers [T, F], but the samples are {sample}")
    if takes == "rows" and len(shape) != 1:
        raise UserError(f"{model.name} needs rows of a table [F], but the samples are {sample}; mlp takes any shape")
    try:
        model.shapes()
    except UserError as error:
        if takes != "images":
            raise
        raise UserError(f"images of {sample} are too small for {model.name}: {error}; use another model") from error


SUITED = {1: "a network such as mlp", 2: "transformer_tiny or lstm2", 3: "unet"}
"""Networks whose outputs have this many axes."""


def check_output(model: Model) -> None:
    """Check that a network returns what its task needs. Raises a UserError: the shape of its output is another one."""
    found, needed = model.output_shape(), model.task.outputs(model.input_shape)
    if found != needed:
        if "classes" in model.task.provides and len(found) == 1:
            raise UserError(
                f"{model.name} returns {found[0]} logits, but the data need {model.task.width}, one per class"
            )
        raise UserError(
            f"{model.name} returns {_product(found)} numbers per sample, but {model.task.name} needs "
            f"{_product(needed)}: use {SUITED.get(len(needed), 'another network')}"
        )


def _product(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


__all__ = [
    "MODELS", "BlockNet", "Layer", "Model", "ModelRow", "Variables", "Zoo", "as_in_source", "build", "check_output",
    "of_module",
]  # fmt: skip
