"""Fair tuning: the same number of trials for every method, chosen on validation samples, tested on other seeds.

    python -m fedjax_mr.tune --strategies=fedavg,fedmr --budget=8 --space=SPACE.flags

1. *Trials.* Each method gets T settings of its search space (`space`), proposed by a Halton sequence or by a sampler of
   Optuna (`studies`). Trials train with validation samples, which no client trains on.
2. *Rungs* (`rungs`). All trials train for a part of the rounds; the best of them continue, as in successive halving
   (Jamieson and Talwalkar, 2016). A trial that continues is a run that is resumed with more rounds.
3. *Tests.* The best setting of each method is trained on other seeds. Their test accuracy is the result (`report`).

Selection reads only the validation columns of a run (`scores`). All state is in the run folders: the same command again
continues after a kill, and several processes with the same command share the runs.
"""

from fedjax_mr.tune.plan import Trial, Tuning, plan

__all__ = ["Trial", "Tuning", "plan"]
