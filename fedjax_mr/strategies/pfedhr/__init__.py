"""pFedHR: the strategy, and its server's host code: networks taken apart into blocks and put together anew.

Wang et al.: Towards Personalized Federated Learning via Heterogeneous Model Reassembly, NeurIPS 2023, section 3.2. In
the order of the algorithm: `strategy`, `chains` (a network as a chain of pieces, and its training), `similarity` (of
blocks, by CKA), `groups`, `search` (which blocks may follow each other), `stitches` (what joins them), `contrastive`
(training without labels). Every candidate is another network, so only its pieces are compiled, each once.
"""

from fedjax_mr.strategies.pfedhr.strategy import Hyper, build

__all__ = ["Hyper", "build"]
