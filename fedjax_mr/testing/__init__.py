"""The contract: tests that every strategy must pass, including strategies registered by users.

    python -m fedjax_mr.testing --import=my_method.py
    pytest -p fedjax_mr_pytest --pyargs fedjax_mr.testing --import=my_method.py    # the same

The contract tests the strategies that the files register; without ``--import``, all strategies. On small federations it
checks shapes and dtypes, that each program is traced once, equal bits for any division into calls and after a
checkpoint, equal numbers on all layouts, progress on an easy problem, statistics, and traffic. If the default
hyper-parameters of a strategy do not suit a few clients with a few samples, its row names others:
``fmr.Row(build, Hyper, "paper", contract=fmr.Contract(small=Hyper(...)))``.

Other options are pytest's, such as ``-k NAME``, or ``-m 'not slow'`` for the quick tests. Only this package needs
pytest (extra ``test``). Dtype promotion is strict and warnings are errors.
"""
