"""What if this client had not joined? Train the federations of many sets of clients, and value each client by them.

    python -m fedjax_mr.whatif --clients=6 --cohort=6 --rounds=10

1. *Coalitions* (`coalitions`): sets of clients, such as all subsets, or all clients but one.
2. *Training* (`train`): each coalition is a trial, in which the other clients do not exist. The trials share the seed,
   the partition and every client's random keys, so their results differ by the clients alone. Trials with equally large
   cohorts train in one compiled program.
3. *Contributions* (`contributions`): Shapley values and others, from the metrics of the trained coalitions.
"""

from fedjax_mr.whatif.train import WhatIf, what_if

__all__ = ["WhatIf", "what_if"]
