"""Huge pages for the large buffers of a command.

The program of a round takes its buffers from the system anew each round, gigabytes for large networks. In pages of 4 KB
they cost a million page faults, and the devices of one process wait for each other in them. Pages of 2 MB cost a few
hundred. Where Linux gives them on request only, malloc of glibc requests them if a variable says so when it starts.
"""

import contextlib
import os
import sys
from pathlib import Path

VARIABLE, VALUE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # for instance "always [madvise] never"
SINCE = (2, 35)  # the version of glibc from which on it knows the value


def begin() -> None:
    """Start this process again with the variable, where it helps. That takes 30 ms if nothing is imported yet.

    A user who sets the variable, be it to nothing, keeps what it says.
    """
    if VARIABLE in os.environ or not sys.executable or not _on_request():
        return
    os.environ[VARIABLE] = VALUE
    with contextlib.suppress(OSError):  # everything works without huge pages
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _on_request() -> bool:
    """Whether the system has huge pages on request only, and malloc can request them."""
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= SINCE and "[madvise]" in MODE.read_text()
    except (OSError, ValueError, AttributeError):  # no Linux, another library
        return False
