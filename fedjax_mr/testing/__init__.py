"""The contract that every strategy keeps, for methods of one's own, too.

    python -m fedjax_mr.testing --import=my_method.py
    pytest -p fedjax_mr_pytest --pyargs fedjax_mr.testing --import=my_method.py    # the same

It tests what the files register (without ``--import``: all strategies) on tiny federations: shapes and dtypes, one
trace, the same bits for any division into calls and after a checkpoint, the same numbers on all layouts, progress on an
easy problem, statistics, traffic. Other options are pytest's: ``-k NAME``, ``-m 'not slow'`` for the quick half.
pytest is needed here alone (extra ``test``). Dtype promotion is strict and warnings are errors, as in our own suite.
"""
