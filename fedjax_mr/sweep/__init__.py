"""Many runs by one command: the product of strategies, settings and seeds, one run folder each.

    python -m fedjax_mr.sweep --flagfile=exp/quickstart.flags --strategies=fedavg,fedmr --seeds=0:3 --grid alpha=0.1,0.5

Each run is a process of its own, ``python -m fedjax_mr.main``, which ends with the sweep: compiled programs take
hundreds of memory maps each, of which Linux allows a process 65,530, and a process that aborts takes no other run with
it. The compilation cache makes all but the first of a kind start quickly. The same command skips the runs that are
finished and goes on with those that are not, whatever was added to the sweep in between: a run is known by the settings
in its folder. (The digest in the folder's name keeps names apart.)
"""

from fedjax_mr.sweep.plan import PlannedRun, Sweep, plan

__all__ = ["PlannedRun", "Sweep", "plan"]
