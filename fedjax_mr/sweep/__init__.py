"""Many runs with one command: the product of strategies, settings and seeds, with one run folder each.

    python -m fedjax_mr.sweep --flagfile=exp/quickstart.flags --strategies=fedavg,fedmr --seeds=0:3 --grid alpha=0.1,0.5

Each run is a process, ``python -m fedjax_mr.main``, that stops with the sweep. One process for all runs would not do:
each compiled program takes hundreds of memory maps, of which Linux allows 65,530 per process, and an aborted run would
end all others. With the compilation cache, only the first run of a kind compiles. The same command skips finished runs
and resumes the others, also after the sweep was extended: a run is identified by the settings in its folder. The digest
in a folder's name only keeps names unique.
"""

from fedjax_mr.sweep.plan import PlannedRun, Sweep, plan

__all__ = ["PlannedRun", "Sweep", "plan"]
