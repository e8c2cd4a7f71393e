"""Is one method better than another? Train paired seeds until that is decided.

    python -m fedjax_mr.compare --strategies=fedavg,fedmr --margin=0.01

1. *Methods* (`methods`): configurations of one problem. What differs between them is named.
2. *Training* (`train`): blocks of seeds. In a block, the runs of a method train in one program where that pays.
3. *Verdict* (`analysis.ledger`): after each block, a test that stays valid however often one looks (`analysis.paired`).
   A pair of methods is decided when one is better, or both are equal within a margin. Decided pairs train no further.

All is kept in a folder: the runs, and a ledger of seeds, settings, values and verdicts. The same command continues
after a kill, and writes the same ledger again, bit for bit.
"""

import sys
import types

from fedjax_mr.analysis.ledger import Comparison, replay
from fedjax_mr.compare.train import compare

__all__ = ["Comparison", "compare", "replay"]


class _Callable(types.ModuleType):
    """This room with the call of its function, because ``fmr.compare`` is the name of both."""

    __call__ = staticmethod(compare)


sys.modules[__name__].__class__ = _Callable
