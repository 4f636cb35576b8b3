"""`python -m relevo.workers.text --fd N`: one model's tokenizer and chat template, in a process of their own.

It outlives the GPU: whatever happens to the workers that compute, prompts can be rendered and counted. Template and
vocabulary come out of a stranger's file, so the whole of it may hang or die without harm to the gateway.
"""

from __future__ import annotations

import argparse
import socket
import sys

from relevo.workers.frames import FrameError, FrameSocket
from relevo.workers.text.process import RENDER_S, TextProcess


def main() -> int:
    """Serve until the other end closes or asks to shut down. 0 then; 1 when the model could not be loaded; 2 when the
    other end broke the protocol."""
    parser = argparse.ArgumentParser(prog="relevo.workers.text", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the connected socket")
    parser.add_argument("--render-s", type=float, default=RENDER_S, help="processor time of one rendering")
    arguments = parser.parse_args()
    frames = FrameSocket(socket.socket(fileno=arguments.fd))
    try:
        return TextProcess(frames, arguments.render_s).run()
    except FrameError as e:
        print(f"The text process ends: {e}", file=sys.stderr)
        return 2
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the gateway is gone, and nobody is left to answer
    finally:
        frames.close()


if __name__ == "__main__":
    sys.exit(main())
