"""Run generated programs in isolation: `run_program` against a task's tests, `available_isolation` on this system.

run.py is the entry point; bubblewrap.py starts the processes; child.py is what they run first and programs.py what
then; wire_format.py is how they talk; seccomp.py is which system calls they are refused.
"""

from sinklens.evaluation.sandbox.run import Isolation, Limits, Outcome, available_isolation, run_program

__all__ = ["Isolation", "Limits", "Outcome", "available_isolation", "run_program"]
