"""pFedHR: the strategy, and the host code of its server, which decomposes networks into blocks and reassembles them.

Wang et al.: Towards Personalized Federated Learning via Heterogeneous Model Reassembly, NeurIPS 2023, section 3.2. The
modules in the order of the algorithm: `strategy`, `chains` (networks as chains of pieces, and their training),
`similarity` (of blocks, by CKA), `groups`, `search` (for candidates), `stitches` (layers that join blocks),
`contrastive` (training without labels). Every candidate is a different network, so only pieces are compiled, each of
them once.
"""

from fedjax_mr.strategies.pfedhr.strategy import Hyper, build

__all__ = ["Hyper", "build"]
