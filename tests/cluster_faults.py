"""A program that tests start with torchrun: run a script whose second process is killed in the middle of a step, the first time round."""

import os
import runpy
import signal
import sys
import time

from isobatch_torch.collective import TorchCollective


def die_after(messages):
    """Kill this process when it has begun to send so many messages."""
    real = TorchCollective.noticing
    sent = []

    def noticing(self):
        sent.append(1)
        if self.rank == 1 and len(sent) == messages and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.stderr.write(f"killed at {time.time()}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self)

    TorchCollective.noticing = noticing


if __name__ == "__main__":
    messages, script, *rest = sys.argv[1:]
    die_after(int(messages))
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
