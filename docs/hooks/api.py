"""The pages of the API: one page per subject, which mkdocstrings fills from the docstrings. The library comes first."""

# Part of the API: its pages. A page has a name, a title, a first sentence, and the modules or names that it documents.
PARTS = {
    "The library": {
        "simulator": (
            "Simulator",
            "A federation as one Python object, the local training of its clients, and the data that it needs.",
            [
                "fedjax_mr.engine.simulator.Simulator",
                "fedjax_mr.engine.layout.Layout",
                "fedjax_mr.client.local.setting",
                "fedjax_mr.data.divide.federate",
                "fedjax_mr.data.divide.Splits",
                "fedjax_mr.data.sources.arrays.from_arrays",
                "fedjax_mr.errors",
            ],
        ),
        "strategies": (
            "Strategies",
            "The interface of a strategy, its settings, and strategies built from strategies.",
            [
                "fedjax_mr.strategies.interface",
                "fedjax_mr.strategies.parts",
                "fedjax_mr.strategies.traffic",
                "fedjax_mr.strategies.Row",
                "fedjax_mr.strategies.Contract",
                "fedjax_mr.settings.field",
                "fedjax_mr.strategies.transforms",
            ],
        ),
        "training": (
            "Training and rounds",
            "The training of one client, and the rounds of the engine.",
            [
                "fedjax_mr.client.samples",
                "fedjax_mr.client.local",
                "fedjax_mr.client.mutual",
                "fedjax_mr.engine.round",
                "fedjax_mr.engine.rounds",
                "fedjax_mr.engine.clients",
            ],
        ),
        "trees": ("Trees", "Arithmetic on parameters and on whole models.", ["fedjax_mr.trees"]),
        "models": (
            "Models",
            "Networks as pure functions, and zoos of several.",
            ["fedjax_mr.models.base", "fedjax_mr.models.zoo", "fedjax_mr.models.layers"],
        ),
        "data": (
            "Data",
            "Datasets, partitions, and the federation that results from them.",
            ["fedjax_mr.data.federated", "fedjax_mr.data.partition", "fedjax_mr.data.divide"],
        ),
        "channel": (
            "Channel",
            "Links between clients and server: compression, privacy, attacks, robust rules.",
            ["fedjax_mr.channel.base", "fedjax_mr.channel.links", "fedjax_mr.channel.accounting"],
        ),
        "clock": (
            "Clock",
            "Simulated time, asynchronous clients and deadlines.",
            [
                "fedjax_mr.clock.fleet",
                "fedjax_mr.clock.schedule",
                "fedjax_mr.clock.asynchronous",
                "fedjax_mr.clock.online",
                "fedjax_mr.clock.deadline",
            ],
        ),
    },
    "The laboratory": {
        "runs": (
            "Runs",
            "A run with its folder, checkpoints and plots, and what you can do with a finished one.",
            [
                "fedjax_mr.experiment.run.run",
                "fedjax_mr.experiment.trials.run_together",
                "fedjax_mr.config.config.Config",
                "fedjax_mr.experiment.experiment.Result",
                "fedjax_mr.experiment.load.load",
                "fedjax_mr.experiment.load.SavedRun",
                "fedjax_mr.experiment.trained.TrainedNetwork",
            ],
        ),
        "analysis": (
            "Analysis",
            "Runs, groups of runs and tables, for your own statistics.",
            [
                "fedjax_mr.analysis.frames",
                "fedjax_mr.analysis.learning.plot_curves",
                "fedjax_mr.analysis.runs",
                "fedjax_mr.analysis.groups",
            ],
        ),
        "compare": (
            "Verdicts",
            "Comparisons that stop when they are decided, and their statistics.",
            ["fedjax_mr.compare.train.compare", "fedjax_mr.analysis.ledger", "fedjax_mr.analysis.paired"],
        ),
    },
}


def navigation() -> list[dict[str, list[dict[str, str]]]]:
    """The entries of the navigation."""
    return [
        {part: [{title: f"api/{name}.md"} for name, (title, _, _) in pages.items()]} for part, pages in PARTS.items()
    ]


def pages() -> dict[str, str]:
    """The pages by their path in the site."""
    return {
        f"api/{name}.md": "\n\n".join([f"# {title}", sentence, *(f"::: {each}" for each in documented), ""])
        for part in PARTS.values()
        for name, (title, sentence, documented) in part.items()
    }
