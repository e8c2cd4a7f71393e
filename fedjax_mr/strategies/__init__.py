"""Strategies by name; one paper, one file. A row of `STRATEGIES` is all the registration that a new file needs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.strategies import (
    adaptivefl,
    centralized,
    clusamp,
    ditto,
    fccl,
    fedasam,
    fedavg,
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
    fedmut,
    fedntd,
    fedprox,
    fedsmoo,
    fedswa,
    flatness,
    fml,
    heterofl,
    hypcluster,
    indep,
    local_only,
    mapper,
    moon,
    partial,
    perfedavg,
    pfedbayes,
    pfedhr,
    pfedme,
    prototypes,
    scaffold,
    transforms,
)
from fedjax_mr.strategies.base import Cohort, Parcels, Problem, Strategy, Traffic


class Row(NamedTuple):
    """A registered strategy.

    Attributes:
      build: (hyper, problem) -> Strategy.
      hyper: the dataclass of its own settings (flags ``--<strategy>_<field>``); None if it has none.
      paper: authors and venue, for the table of strategies.
      several: whether clients may have networks of different architectures (a `Zoo`).
      public: whether it takes public data.
      title: its name in pictures and papers' tables; "" takes the name that it is registered by.
      needs_public: whether it cannot run without public data, and so gets some by default; or hyper -> that.
      label_counts: whether the server uses ``problem.label_counts``, which real clients then have to tell it.
      only_simulated: why it cannot run on real clients; "" if it can.
      group: the group of methods to which it belongs, for lists; "" is that of methods from outside.
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


SETTINGS = (
    "the settings of fmr.STRATEGIES[{name!r}] are no dataclass of numbers, texts and switches that all have defaults "
    "({error})"
)


def check_row(name: str, row: Any) -> None:
    """Check the row of a strategy from outside the package.

    Raises:
      UserError: it is no `Row`, or its settings are no dataclass of defaults.
    """
    place = f"fmr.STRATEGIES[{name!r}]"
    if not isinstance(row, Row) or not callable(row.build) or not isinstance(row.paper, str):
        raise UserError(f"{place} takes fmr.Row(build, Hyper or None, 'paper'), with build(hyper, problem) a function")
    if row.hyper is None:
        return
    try:
        if not isinstance(row.hyper, type) or not dataclasses.is_dataclass(row.hyper):
            raise TypeError("it is no dataclass")
        row.hyper()
    except TypeError as error:
        raise UserError(SETTINGS.format(name=name, error=error)) from None


_OURS: dict[str, dict[str, Row]] = {
    "averaging": {
        "fedavg": Row(fedavg.build, fedavg.Hyper, "McMahan et al., AISTATS 2017", title="FedAvg"),
        "fedexp": Row(fedexp.build, fedexp.Hyper, "Jhunjhunwala et al., ICLR 2023", title="FedExP"),
        "clusamp": Row(clusamp.build, clusamp.Hyper, "Fraboni et al., ICML 2021", title="CluSamp"),
    },
    "drift": {
        "fedprox": Row(fedprox.build, fedprox.Hyper, "Li et al., MLSys 2020", title="FedProx"),
        "scaffold": Row(scaffold.build, scaffold.Hyper, "Karimireddy et al., ICML 2020", title="SCAFFOLD"),
        "moon": Row(moon.build, moon.Hyper, "Li et al., CVPR 2021", title="MOON"),
        "fedgen": Row(fedgen.build, fedgen.Hyper, "Zhu et al., ICML 2021", title="FedGen", label_counts=True),
        "feddyn": Row(feddyn.build, feddyn.Hyper, "Acar et al., ICLR 2021", title="FedDyn"),
        "feddc": Row(feddc.build, feddc.Hyper, "Gao et al., CVPR 2022", title="FedDC"),
        "fedntd": Row(fedntd.build, fedntd.Hyper, "Lee et al., NeurIPS 2022", title="FedNTD"),
        "fedlc": Row(fedlc.build, fedlc.Hyper, "Zhang et al., ICML 2022", title="FedLC"),
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
    "several models": {
        "fedmr": Row(fedmr.build, fedmr.Hyper, "Hu et al., KDD 2024", title="FedMR"),
        "indep": Row(indep.build, None, "Hu et al., KDD 2024 (FedMR without recombination)", title="Indep"),
        "fedcross": Row(fedcross.build, fedcross.Hyper, "Hu et al., arXiv 2022", title="FedCross"),
        "fedmut": Row(fedmut.build, fedmut.Hyper, "Hu et al., AAAI 2024", title="FedMut"),
        "hypcluster": Row(hypcluster.build, hypcluster.Hyper, "Mansour et al., arXiv 2020", title="HypCluster"),
        "fedmerge": Row(fedmerge.build, fedmerge.Hyper, "Chen et al., AAAI 2026", title="FedMerge"),
    },
    "personal": {
        "pfedme": Row(pfedme.build, pfedme.Hyper, "Dinh et al., NeurIPS 2020", title="pFedMe"),
        "perfedavg": Row(perfedavg.build, perfedavg.Hyper, "Fallah et al., NeurIPS 2020", title="Per-FedAvg"),
        "pfedbayes": Row(pfedbayes.build, pfedbayes.Hyper, "Zhang et al., ICML 2022", title="pFedBayes"),
        "ditto": Row(ditto.build, ditto.Hyper, "Li et al., ICML 2021", title="Ditto"),
        "fedrep": Row(partial.fedrep, partial.FedRep, "Collins et al., ICML 2021", title="FedRep"),
        "fedper": Row(partial.fedper, None, "Arivazhagan et al., arXiv 2019", title="FedPer"),
        "fedbn": Row(partial.fedbn, None, "Li et al., ICLR 2021", title="FedBN"),
        "lgfedavg": Row(partial.lgfedavg, None, "Liang et al., arXiv 2020", title="LG-FedAvg"),
        "mapper": Row(mapper.build, mapper.Hyper, "Mansour et al., arXiv 2020", title="MAPPER"),
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
            only_simulated="its server computes each client's lesson from the client's own samples",
        ),
        "fedmd": Row(
            fedmd.build,
            fedmd.Hyper,
            "Li and Wang, NeurIPS workshop 2019",
            several=True,
            public=True,
            title="FedMD",
            needs_public=True,
        ),
        "fedgh": Row(fedgh.build, fedgh.Hyper, "Yi et al., ACM MM 2023", several=True, title="FedGH"),
        "fedproto": Row(
            prototypes.fedproto, prototypes.FedProto, "Tan et al., AAAI 2022", several=True, title="FedProto"
        ),
        "fedtgp": Row(prototypes.fedtgp, prototypes.FedTGP, "Zhang et al., AAAI 2024", several=True, title="FedTGP"),
        "fedkemf": Row(
            fedkemf.build,
            fedkemf.Hyper,
            "Yu et al., arXiv 2022",
            several=True,
            public=True,
            title="FedKEMF",
            needs_public=True,
        ),
        "fccl": Row(
            fccl.build,
            fccl.Hyper,
            "Huang et al., CVPR 2022",
            several=True,
            public=True,
            title="FCCL",
            needs_public=True,
        ),
        "heterofl": Row(
            heterofl.build,
            heterofl.Hyper,
            "Diao et al., ICLR 2021",
            public=True,
            title="HeteroFL",
            needs_public=heterofl.needs_public,
            label_counts=True,
            only_simulated="a slice travels, and is computed, with the zeros around it",
        ),
        "adaptivefl": Row(
            adaptivefl.build,
            adaptivefl.Hyper,
            "Jia et al., DAC 2024",
            title="AdaptiveFL",
            only_simulated="a slice travels, and is computed, with the zeros around it",
        ),
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
            only_simulated="one client trains on the samples of all",
        ),
    },
}
STRATEGIES = Registry(
    "strategy",
    "fmr.STRATEGIES",
    check_row,
    {name: row._replace(group=group) for group, rows in _OURS.items() for name, row in rows.items()},
)


def by_group() -> dict[str, list[str]]:
    """Return the names of the strategies by their group, in order; those from outside, of group "", last."""
    names: dict[str, list[str]] = {group: [] for group in (*_OURS, *(row.group for row in STRATEGIES.values()))}
    for name, row in STRATEGIES.items():
        names[row.group].append(name)
    return names


__all__ = ["STRATEGIES", "Cohort", "Parcels", "Problem", "Row", "Strategy", "Traffic", "transforms"]
