"""Run generated programs in isolation: `run_program` against a task's tests, `available_isolation` on this system.

run.py is the entry point; parent.py starts the processes and child.py isolates them; programs.py is what they run;
wire_format.py is how they talk; seccomp.py is what a Linux process can give up.
"""

from sinklens.evaluation.sandbox.run import Isolation, Limits, Outcome, available_isolation, run_program

__all__ = ["Isolation", "Limits", "Outcome", "available_isolation", "run_program"]
