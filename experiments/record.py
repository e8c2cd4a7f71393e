"""The record of this project's own runs: pages, flag files and the tables of kept runs behind them.

python experiments/record.py                            # bring every page up to date
python experiments/record.py --check                    # change nothing; exit code 1 if a page is out of date
python experiments/record.py keep RUN ... --name=NAME   # add ended runs to results/NAME.jsonl.gz
python experiments/record.py channel                    # try every link of the channel with every method (minutes)
python experiments/record.py tasks                      # try every task with every method (minutes)
python experiments/record.py --help                     # all commands
"""

import sys

from fedjax_mr.terminal import interrupts
from record.command import main  # the package record/ beside this file

if __name__ == "__main__":
    sys.exit(interrupts.run(main))
