"""What holds for all tests."""

import os
from contextlib import suppress

from hypothesis import settings

# Machines that run tests are busy: how long one example takes says nothing.
settings.register_profile("shardwright", deadline=None)
settings.load_profile("shardwright")

# Tests run on all cores at once. Threads of torch beside them would spin while they wait for a core; some tests took
# five times their CPU time. Before anything imports torch, and commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ranks and commands inherit this as well. Each message between ranks wakes a thread. If that takes the core from the
# sender at once, the sender still holds its connection's lock, and its own thread for arrivals spins on it: half of a
# rank's system time. A batch process waits for its turn instead.
with suppress(AttributeError, OSError):  # Linux has it, and a sandbox may refuse
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
