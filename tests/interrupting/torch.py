"""In the place of torch: Ctrl-C while it is imported."""

import os
import signal

os.kill(os.getpid(), signal.SIGINT)
