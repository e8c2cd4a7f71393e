"""Many runs with one command: the product of strategies, settings and seeds, with one run folder each.

    python -m fedjax_mr.sweep --flagfile=exp/quickstart.flags --strategies=fedavg,fedmr --seeds=0:3 --grid alpha=0.1,0.5

The runs of a sweep share a process (`process.Worker`), so only the first run of a kind imports, traces and compiles. A
run that dies takes no other with it: the next one gets a fresh process. The process stops with the sweep. The same
command skips finished runs and resumes the others, also after the sweep was extended: a run is identified by the
settings in its folder. The digest in a folder's name only keeps names unique.
"""

from fedjax_mr.sweep.plan import PlannedRun, Sweep, plan

__all__ = ["PlannedRun", "Sweep", "plan"]
