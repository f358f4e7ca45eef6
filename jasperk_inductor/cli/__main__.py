"""`python -m jasperk_inductor.cli`."""

from . import main

main()
