"""Strategies by name. Each paper has one file, and each strategy is registered by one row of `STRATEGIES`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.strategies import (
    adaptivefl,
    centralized,
    clusamp,
    diloco,
    ditto,
    dpsgd,
    fccl,
    fedala,
    fedasam,
    fedasync,
    fedavg,
    fedawa,
    fedbuff,
    fedcross,
    feddc,
    feddyn,
    fedexp,
    fedgen,
    fedgh,
    fedkemf,
    fedlc,
    fedmd,
    fedme,
    fedmerge,
    fedmr,
    fedmuon,
    fedmut,
    fedntd,
    fedprox,
    fedrod,
    fedsa,
    fedsmoo,
    fedsubavg,
    fedswa,
    flatness,
    fml,
    gitfl,
    gossipmr,
    heterofl,
    hierfavg,
    hypcluster,
    ifca,
    indep,
    kgt,
    local_only,
    lora,
    mapper,
    moon,
    partial,
    perfedavg,
    pfedbayes,
    pfedhr,
    pfedme,
    prototypes,
    scaffold,
    ties,
    transforms,
)
from fedjax_mr.strategies.decentralised import ONLY_SIMULATED
from fedjax_mr.strategies.graphs import GRAPHS
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.traffic import Parcels, Traffic


class Contract(NamedTuple):
    """What the contract (`fedjax_mr.testing`) must know about a strategy. Trained runs do not depend on it.

    Attributes:
      small: hyper-parameters with which the contract trains the strategy on a few clients with a few samples. Default:
        those of ``hyper()``.
      extrapolating: hyper-parameters with which models leave the range spanned by the clients' models. The contract
        tests them too: no variance may become negative. None if no setting extrapolates.
      own_batches: whether a client does something else than the usual epochs over all its samples. The contract then
        does not count samples and steps.
    """

    small: Any = None
    extrapolating: Any = None
    own_batches: bool = False


class Row(NamedTuple):
    """A registered strategy.

    Attributes:
      build: (hyper, problem) -> Strategy.
      hyper: dataclass of the hyper-parameters, or None if there are none.
      paper: authors and venue, for the table of strategies.
      several: whether clients may have networks of different architectures (a `Zoo`).
      public: whether the strategy accepts public data.
      title: name in figures and tables. Default: the registered name.
      needs_public: whether the strategy requires public data, and therefore gets some by default; or a function
        hyper -> bool.
      label_counts: whether the server reads ``problem.label_counts``, which real clients then have to report.
      only_simulated: why the strategy cannot run on real clients; "" if it can.
      group: group of methods for lists; "" for methods registered outside the package.
      needs: what the strategy needs of a task (`Task.provides`), such as ``classes``. "": it suits every task.
      adapters: whether the strategy needs a network with adapters (``models.adapters.lora``).
      contract: what the contract must know about the strategy.
    """

    build: Callable[[Any, Problem], Strategy]
    hyper: type | None
    paper: str
    several: bool = False
    public: bool = False
    title: str = ""
    needs_public: bool | Callable[[Any], bool] = False
    label_counts: bool = False
    only_simulated: str = ""
    group: str = ""
    adapters: bool = False
    needs: str = ""
    contract: Contract = Contract()


SETTINGS = (
    "the hyper-parameters of fmr.STRATEGIES[{name!r}] must be a dataclass of numbers, strings and booleans, each with "
    "a default ({error})"
)


def check_row(name: str, row: Any) -> None:
    """Check the row of a strategy that a user registers.

    Raises:
      UserError: it is not a `Row`, its hyper-parameters are not a dataclass of defaults, or ``contract`` is no
        `Contract` with instances of it.
    """
    place = f"fmr.STRATEGIES[{name!r}]"
    if not isinstance(row, Row) or not callable(row.build) or not isinstance(row.paper, str):
        raise UserError(f"{place} takes fmr.Row(build, Hyper or None, 'paper'), with build(hyper, problem) a function")
    if not isinstance(row.contract, Contract):
        raise UserError(f"{place}: contract must be fmr.Contract(...), not {row.contract!r}")
    for field in ("small", "extrapolating"):
        value = getattr(row.contract, field)
        if value is not None and type(value) is not row.hyper:
            raise UserError(f"{place}: {field} must be an instance of its hyper-parameters, not {value!r}")
    if row.hyper is None:
        return
    try:
        if not isinstance(row.hyper, type) or not dataclasses.is_dataclass(row.hyper):
            raise TypeError("not a dataclass")
        row.hyper()
    except TypeError as error:
        raise UserError(SETTINGS.format(name=name, error=error)) from None


_OURS: dict[str, dict[str, Row]] = {
    "averaging": {
        "fedavg": Row(fedavg.build, fedavg.Hyper, "McMahan et al., AISTATS 2017", title="FedAvg"),
        "fedexp": Row(
            fedexp.build,
            fedexp.Hyper,
            "Jhunjhunwala et al., ICLR 2023",
            title="FedExP",
            contract=Contract(extrapolating=fedexp.Hyper(epsilon=0.0)),
        ),
        "fedawa": Row(fedawa.build, fedawa.Hyper, "Shi et al., CVPR 2025", title="FedAWA"),
        "clusamp": Row(clusamp.build, clusamp.Hyper, "Fraboni et al., ICML 2021", title="CluSamp"),
        "fedsubavg": Row(fedsubavg.build, fedsubavg.Hyper, "Ding et al., NeurIPS 2022", title="FedSubAvg"),
        "diloco": Row(
            diloco.build,
            diloco.Hyper,
            "Douillard et al., arXiv 2023",
            title="DiLoCo",
            contract=Contract(extrapolating=diloco.Hyper(outer_lr=2.0)),
        ),
        "hierfavg": Row(hierfavg.build, hierfavg.Hyper, "Liu et al., ICC 2020", title="HierFAVG"),
        "ties": Row(
            ties.ties,
            ties.TIES,
            "Yadav et al., NeurIPS 2023",
            title="TIES-Merging",
            contract=Contract(extrapolating=ties.TIES(scale=3.0)),
        ),
        "taskarithmetic": Row(
            ties.taskarithmetic,
            ties.TaskArithmetic,
            "Ilharco et al., ICLR 2023",
            title="Task arithmetic",
            contract=Contract(extrapolating=ties.TaskArithmetic(scale=1.0)),
        ),
    },
    "decentralised": {
        name: row._replace(only_simulated=ONLY_SIMULATED)
        for name, row in {
            "dpsgd": Row(dpsgd.build, dpsgd.Hyper, "Lian et al., NeurIPS 2017", title="D-PSGD"),
            "gossipmr": Row(gossipmr.build, gossipmr.Hyper, "ours; FedMR: Hu et al., KDD 2024", title="Gossip-MR"),
            "kgt": Row(kgt.build, kgt.Hyper, "Liu et al., Optim. Methods Softw. 2024", title="K-GT"),
        }.items()
    },
    "drift": {
        "fedprox": Row(fedprox.build, fedprox.Hyper, "Li et al., MLSys 2020", title="FedProx"),
        "scaffold": Row(
            scaffold.build,
            scaffold.Hyper,
            "Karimireddy et al., ICML 2020",
            title="SCAFFOLD",
            contract=Contract(extrapolating=scaffold.Hyper(server_lr=2.0)),
        ),
        "fedmuon": Row(fedmuon.build, fedmuon.Hyper, "Takezawa et al., ICLR 2026", title="FedMuon"),
        "moon": Row(moon.build, moon.Hyper, "Li et al., CVPR 2021", title="MOON"),
        "fedgen": Row(
            fedgen.build,
            fedgen.Hyper,
            "Zhu et al., ICML 2021",
            title="FedGen",
            needs="classes",
            label_counts=True,
            contract=Contract(small=fedgen.Hyper(steps=5, batch_size=16)),
        ),
        "feddyn": Row(feddyn.build, feddyn.Hyper, "Acar et al., ICLR 2021", title="FedDyn"),
        "feddc": Row(feddc.build, feddc.Hyper, "Gao et al., CVPR 2022", title="FedDC"),
        "fedntd": Row(fedntd.build, fedntd.Hyper, "Lee et al., NeurIPS 2022", title="FedNTD", needs="classes"),
        "fedlc": Row(fedlc.build, fedlc.Hyper, "Zhang et al., ICML 2022", title="FedLC", needs="classes"),
    },
    "flatness": {
        "fedasam": Row(fedasam.build, fedasam.Hyper, "Caldarola et al., ECCV 2022", title="FedASAM"),
        "fedsam": Row(flatness.fedsam, flatness.FedSAM, "Qu et al., ICML 2022", title="FedSAM"),
        "mofedsam": Row(flatness.mofedsam, flatness.MoFedSAM, "Qu et al., ICML 2022", title="MoFedSAM"),
        "fedgamma": Row(flatness.fedgamma, flatness.FedGAMMA, "Dai et al., TNNLS 2023", title="FedGAMMA"),
        "fedspeed": Row(flatness.fedspeed, flatness.FedSpeed, "Sun et al., ICLR 2023", title="FedSpeed"),
        "fedsmoo": Row(fedsmoo.build, fedsmoo.Hyper, "Sun et al., ICML 2023", title="FedSMOO"),
        "fedswa": Row(fedswa.build, fedswa.Hyper, "Liu et al., ICML 2025", title="FedSWA"),
        "fedmoswa": Row(fedswa.build_momentum, fedswa.MomentumHyper, "Liu et al., ICML 2025", title="FedMoSWA"),
    },
    "asynchronous": {
        "fedasync": Row(fedasync.build, fedasync.Hyper, "Xie et al., arXiv 2019", title="FedAsync"),
        "fedbuff": Row(
            fedbuff.build,
            fedbuff.Hyper,
            "Nguyen et al., AISTATS 2022",
            title="FedBuff",
            contract=Contract(extrapolating=fedbuff.Hyper(lr=2.0)),
        ),
        "fedsa": Row(fedsa.build, fedsa.Hyper, "Ma et al., JSAC 2021", title="FedSA"),
        "gitfl": Row(gitfl.build, gitfl.Hyper, "Hu et al., RTSS 2023", title="GitFL"),
    },
    "several models": {
        "fedmr": Row(fedmr.build, fedmr.Hyper, "Hu et al., KDD 2024", title="FedMR"),
        "indep": Row(indep.build, indep.Hyper, "Hu et al., KDD 2024, without recombination", title="Indep"),
        "fedcross": Row(
            fedcross.build,
            fedcross.Hyper,
            "Hu et al., arXiv 2022",
            title="FedCross",
            contract=Contract(extrapolating=fedcross.Hyper(acceleration="pm_da", acceleration_rounds=8)),
        ),
        "fedmut": Row(
            fedmut.build,
            fedmut.Hyper,
            "Hu et al., AAAI 2024",
            title="FedMut",
            contract=Contract(extrapolating=fedmut.Hyper(radius=8.0)),
        ),
        "hypcluster": Row(hypcluster.build, hypcluster.Hyper, "Mansour et al., arXiv 2020", title="HypCluster"),
        "ifca": Row(ifca.build, ifca.Hyper, "Ghosh et al., NeurIPS 2020", title="IFCA"),
        "fedmerge": Row(fedmerge.build, fedmerge.Hyper, "Chen et al., AAAI 2026", title="FedMerge"),
    },
    "personal": {
        "pfedme": Row(
            pfedme.build,
            pfedme.Hyper,
            "Dinh et al., NeurIPS 2020",
            title="pFedMe",
            contract=Contract(extrapolating=pfedme.Hyper(beta=2.0, strength=1.0)),
        ),
        "perfedavg": Row(perfedavg.build, perfedavg.Hyper, "Fallah et al., NeurIPS 2020", title="Per-FedAvg"),
        "pfedbayes": Row(
            pfedbayes.build,
            pfedbayes.Hyper,
            "Zhang et al., ICML 2022",
            title="pFedBayes",
            contract=Contract(small=pfedbayes.Hyper(zeta=0.1, lr=0.002)),
        ),
        "ditto": Row(ditto.build, ditto.Hyper, "Li et al., ICML 2021", title="Ditto"),
        "fedrep": Row(partial.fedrep, partial.FedRep, "Collins et al., ICML 2021", title="FedRep"),
        "fedper": Row(partial.fedper, partial.FedPer, "Arivazhagan et al., arXiv 2019", title="FedPer"),
        "fedbn": Row(partial.fedbn, None, "Li et al., ICLR 2021", title="FedBN"),
        "lgfedavg": Row(partial.lgfedavg, None, "Liang et al., arXiv 2020", title="LG-FedAvg"),
        "fedala": Row(
            fedala.build,
            fedala.Hyper,
            "Zhang et al., AAAI 2023",
            title="FedALA",
            contract=Contract(small=fedala.Hyper(most_epochs=3)),
        ),
        "fedrod": Row(
            fedrod.build, None, "Chen and Chao, ICLR 2022", title="FedRoD", needs="classes", label_counts=True
        ),
        "mapper": Row(
            mapper.build,
            mapper.Hyper,
            "Mansour et al., arXiv 2020",
            title="MAPPER",
            contract=Contract(
                extrapolating=mapper.Hyper(mode="fedme"),
                own_batches=True,  # parts of the samples, once for every lambda
            ),
        ),
    },
    "several networks": {
        "fml": Row(fml.build, fml.Hyper, "Shen et al., arXiv 2020", several=True, title="FML"),
        "fedme": Row(
            fedme.build,
            fedme.Hyper,
            "Matsuda et al., SDM 2022",
            several=True,
            public=True,
            title="FedMe",
            needs_public=fedme.needs_public,
        ),
        "pfedhr": Row(
            pfedhr.build,
            pfedhr.Hyper,
            "Wang et al., NeurIPS 2023",
            several=True,
            public=True,
            title="pFedHR",
            needs_public=True,
            only_simulated="its server evaluates each client's teacher on the client's samples",
            contract=Contract(small=pfedhr.Hyper(groups=2, max_candidates=2, server_epochs=1, server_lr=1e-4)),
        ),
        "fedmd": Row(
            fedmd.build,
            fedmd.Hyper,
            "Li and Wang, NeurIPS workshop 2019",
            several=True,
            public=True,
            title="FedMD",
            needs_public=True,
            contract=Contract(small=fedmd.Hyper(public_epochs=1, private_epochs=2)),  # a first round like the others
        ),
        "fedgh": Row(fedgh.build, fedgh.Hyper, "Yi et al., ACM MM 2023", several=True, title="FedGH", needs="classes"),
        "fedproto": Row(
            prototypes.fedproto,
            prototypes.FedProto,
            "Tan et al., AAAI 2022",
            several=True,
            title="FedProto",
            needs="classes",
        ),
        "fedtgp": Row(
            prototypes.fedtgp,
            prototypes.FedTGP,
            "Zhang et al., AAAI 2024",
            several=True,
            title="FedTGP",
            needs="classes",
        ),
        "fedkemf": Row(
            fedkemf.build,
            fedkemf.Hyper,
            "Yu et al., arXiv 2022",
            several=True,
            public=True,
            title="FedKEMF",
            needs_public=True,
            # Adam's steps are of full length even along rounding.
            contract=Contract(small=fedkemf.Hyper(server_lr=1e-6)),
        ),
        "fccl": Row(
            fccl.build,
            fccl.Hyper,
            "Huang et al., CVPR 2022",
            several=True,
            public=True,
            title="FCCL",
            needs="classes",
            needs_public=True,
            contract=Contract(small=fccl.Hyper(private_epochs=2)),  # a first round like the others
        ),
        "heterofl": Row(
            heterofl.build,
            heterofl.Hyper,
            "Diao et al., ICLR 2021",
            public=True,
            title="HeteroFL",
            needs_public=heterofl.needs_public,
            label_counts=True,
            only_simulated="slices are sent and trained as whole networks filled with zeros",
        ),
        "adaptivefl": Row(
            adaptivefl.build,
            adaptivefl.Hyper,
            "Jia et al., DAC 2024",
            title="AdaptiveFL",
            only_simulated="slices are sent and trained as whole networks filled with zeros",
        ),
    },
    "adapters": {
        name: row._replace(adapters=True)
        for name, row in {
            "fedit": Row(lora.fedit, fedavg.Hyper, "Zhang et al., ICASSP 2024", title="FedIT"),
            "ffalora": Row(lora.ffalora, fedavg.Hyper, "Sun et al., ICLR 2024", title="FFA-LoRA"),
            "fedsalora": Row(lora.fedsalora, None, "Guo et al., ICLR 2025", title="FedSA-LoRA"),
            "rolora": Row(lora.rolora, None, "Chen et al., NeurIPS 2025", title="RoLoRA"),
            "fedexlora": Row(lora.fedexlora, lora.FedExLora, "Singhal et al., ACL 2025", title="FedEx-LoRA"),
            "flora": Row(lora.flora, lora.Ranks, "Wang et al., NeurIPS 2024", title="FLoRA"),
            "flexlora": Row(lora.flexlora, lora.FlexLora, "Bai et al., NeurIPS 2024", title="FlexLoRA"),
            "hetlora": Row(lora.hetlora, lora.HetLora, "Cho et al., EMNLP 2024", title="HetLoRA"),
        }.items()
    },
    "baselines": {
        "local": Row(
            local_only.build,
            local_only.Hyper,
            "Matsuda et al., SDM 2022 (Local-only)",
            several=True,
            title="Local-only",
        ),
        "centralized": Row(
            centralized.build,
            None,
            "Matsuda et al., SDM 2022 (Centralized)",
            title="Centralized",
            only_simulated="one client trains on the samples of all clients",
        ),
    },
}
STRATEGIES = Registry(
    "strategy",
    "fmr.STRATEGIES",
    check_row,
    {name: row._replace(group=group) for group, rows in _OURS.items() for name, row in rows.items()},
)


def on_any_network() -> list[str]:
    """The names of the strategies that need no adapters."""
    return [name for name, row in STRATEGIES.items() if not row.adapters]


def by_group() -> dict[str, list[str]]:
    """The names of the strategies by group, in order. Strategies registered by users are last, in group ""."""
    names: dict[str, list[str]] = {group: [] for group in (*_OURS, *(row.group for row in STRATEGIES.values()))}
    for name, row in STRATEGIES.items():
        names[row.group].append(name)
    return names


__all__ = [
    "GRAPHS",
    "STRATEGIES",
    "Cohort",
    "Contract",
    "Parcels",
    "Problem",
    "Row",
    "Strategy",
    "Traffic",
    "transforms",
]
