"""A program that tests start with a launcher: run a script in which one process fails in the middle of a step, the first time round."""

import os
import runpy
import signal
import sys
import time

from isobatch_torch.collective import TorchCollective


def fail_after(how, rank, messages):
    """Raise, or get a signal, when this process has begun to send so many messages."""
    real = TorchCollective.noticing
    sent = []

    def noticing(self):
        sent.append(1)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.rank == rank and len(sent) == messages and first:
            sys.stderr.write(f"failed at {time.time()}\n")
            sys.stderr.flush()
            if how == "raise":
                msg = "planted"
                raise ValueError(msg)
            os.kill(os.getpid(), signal.Signals[how])
        return real(self)

    TorchCollective.noticing = noticing


if __name__ == "__main__":
    how, rank, messages, script, *rest = sys.argv[1:]
    fail_after(how, int(rank), int(messages))
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
